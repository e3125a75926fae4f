"""Compares twenty steps of each recipe in float64 with recorded losses.

``python tests/unit/test_recipe_golden.py`` records them again. If these files change, trainings
give other results than before, and the release notes must say so.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path

import pytest
from recipe_tools import hub_variables, one_thread, records  # noqa: F401 - fixtures

from command_lines import overridden
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
    """Returns the loss of every step."""
    return [float(record["loss"]) for record in records(folder, "train")]


def run(recipe: str, folder: Path, *extra_flags: str) -> list[float]:
    """Trains in this process, and returns the loss of every step."""
    module = importlib.import_module(RECIPES[recipe].module)
    default_flags = [*FLAGS[recipe], f"--run-dir={folder}", "--checkpoint-every=never"]
    assert module.main(overridden(default_flags, extra_flags)) == 0
    return losses(folder)


@pytest.mark.parametrize("recipe", FLAGS)
def test_losses_match_recorded_values(recipe: str, tmp_path: Path) -> None:
    measured = run(recipe, tmp_path)
    assert len(measured) == 20
    expected = json.loads((GOLDEN / f"{recipe}.json").read_text())["losses"]
    assert measured == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("recipe", FLAGS)
def test_mid_epoch_evaluations_do_not_change_losses(recipe: str, tmp_path: Path) -> None:
    measured = run(recipe, tmp_path, "--evaluate-every=7")
    expected = json.loads((GOLDEN / f"{recipe}.json").read_text())["losses"]
    assert measured == pytest.approx(expected, rel=1e-8)
    held_out = [record["step"] for record in records(tmp_path, "test") + records(tmp_path, "val")]
    assert held_out == sorted(set(held_out))
    assert {7, 14, 20} <= set(held_out)


@pytest.mark.parametrize("evaluation_flags", [("--evaluate-every=5",), ()])
def test_stop_at_ends_training_early(
    evaluation_flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.recipes.common.MIN_EVALUATION_STEPS", 5)
    stopping_flags = ["--stop-at=0.2", "--steps=200", "--checkpoint-every=50"]
    run("image", tmp_path, *evaluation_flags, *stopping_flags, "--dtype=float32")
    *earlier, final = records(tmp_path, "test")
    assert all(record["accuracy"] < 0.2 for record in earlier)
    assert final["accuracy"] >= 0.2
    assert final["step"] < 200
    assert final["step"] % 5 == 0
    run("image", tmp_path, *evaluation_flags, *stopping_flags, "--dtype=float32")  # again
    assert records(tmp_path, "train")[-1]["step"] == final["step"]


if __name__ == "__main__":
    for name in sys.argv[1:] or FLAGS:
        flags = [flag.replace(f"{REPOSITORY}/", "") for flag in FLAGS[name]]
        with tempfile.TemporaryDirectory() as temporary:
            golden = {"flags": flags, "losses": run(name, Path(temporary))}
        (GOLDEN / f"{name}.json").write_text(json.dumps(golden, indent=1) + "\n")
