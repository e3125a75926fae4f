"""Twenty steps of each recipe in float64, against recorded losses.

``python tests/unit/test_recipe_golden.py`` records them anew; a change of these files says that
trainings give other results than before, and belongs into the notes of a release.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path

import pytest
from recipe_tools import hub_variables, one_thread, records  # noqa: F401 - fixtures

from overriding import overridden
from paceline.recipes import RECIPES

GOLDEN = Path(__file__).parents[1] / "golden/recipes"
REPOSITORY = Path(__file__).parents[2]
COMMON = ("--steps=20", "--log-every=1", "--dtype=float64", "--device=cpu", "--seed=1")
FLAGS: dict[str, tuple[str, ...]] = {
    "image": (*COMMON, "--augment", "flip", "crop", "rotate", "zoom"),
    "text": (*COMMON, "--dropout=0"),
    "translation": (
        *(*COMMON, "--dropout=0", "--model=tiny", "--data=reverse"),
        *("--samples=0", "--seq-len=9", "--global-batch=32"),
    ),
    "language": (
        *(*COMMON, "--depth=2", "--vocab-size=300", "--max-length=32", "--lr=0.01"),
        *(f"--data={REPOSITORY}/LICENSE", "--global-batch=8"),
    ),
}


def losses(folder: Path) -> list[float]:
    """The loss of every step."""
    return [float(one["loss"]) for one in records(folder, "train")]


def run(recipe: str, folder: Path, *more: str) -> list[float]:
    """Trains in this process; the loss of every step."""
    module = importlib.import_module(RECIPES[recipe].module)
    usual = [*FLAGS[recipe], f"--run-dir={folder}", "--checkpoint-every=never"]
    assert module.main(overridden(usual, more)) == 0
    return losses(folder)


@pytest.mark.parametrize("recipe", FLAGS)
def test_losses_are_the_recorded_ones(recipe: str, tmp_path: Path) -> None:
    found = run(recipe, tmp_path)
    assert len(found) == 20
    expected = json.loads((GOLDEN / f"{recipe}.json").read_text())["losses"]
    assert found == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("recipe", FLAGS)
def test_evaluations_in_mid_epoch_change_nothing(recipe: str, tmp_path: Path) -> None:
    found = run(recipe, tmp_path, "--evaluate-every=7")
    expected = json.loads((GOLDEN / f"{recipe}.json").read_text())["losses"]
    assert found == pytest.approx(expected, rel=1e-8)
    held_out = [one["step"] for one in records(tmp_path, "test") + records(tmp_path, "val")]
    assert held_out == sorted(set(held_out))
    assert {7, 14, 20} <= set(held_out)


@pytest.mark.parametrize("every", [("--evaluate-every=5",), ()])
def test_ends_as_soon_as_it_is_good_enough(
    every: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.recipes.common.MIN_EVALUATION_STEPS", 5)
    run("image", tmp_path, *every, "--stop-at=0.2", "--steps=200", "--dtype=float32")
    *before, last = records(tmp_path, "test")
    assert all(one["accuracy"] < 0.2 for one in before)
    assert last["accuracy"] >= 0.2
    assert last["step"] < 200
    assert last["step"] % 5 == 0


if __name__ == "__main__":
    for name in sys.argv[1:] or FLAGS:
        flags = [flag.replace(f"{REPOSITORY}/", "") for flag in FLAGS[name]]
        with tempfile.TemporaryDirectory() as temporary:
            made = {"flags": flags, "losses": run(name, Path(temporary))}
        (GOLDEN / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
