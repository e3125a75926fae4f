"""Language models on several ranks: the same result on any number, packed or not, killed or not."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

lacks_peft = importlib.util.find_spec("peft") is None  # to import it takes every worker seconds
pytestmark = pytest.mark.slow
needs_peft = pytest.mark.skipif(lacks_peft, reason="peft is not installed")
SFT, DPO = (pytest.param(name, marks=needs_peft) for name in ("sft", "dpo"))
WORLDS = {
    "sft": ("world2", "world3", "world4", "single_rows", "recomputed", "killed"),
    "dpo": ("world2", "world3", "world4", "whole_batches", "killed"),
    "language": ("world2", "world3", "world4", "killed"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Returns the trainings of a recipe by their names, run at the first call."""

    @functools.cache
    def run(recipe: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(recipe)
        script = str(Path(__file__).parent / f"{recipe}_worlds.py")
        ended = ranks.run_script([script, str(folder)], folder / "logs", timeout=500)
        found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
        return found

    return run


@pytest.mark.parametrize("recipe", [SFT, DPO, "language"])
def test_ends_as_on_one_rank(recipe: str, results: Callable[[str], dict[str, Any]]) -> None:
    whole = results(recipe)["world1"]
    assert len(whole["train"]) == 8
    for other in WORLDS[recipe]:
        found = results(recipe)[other]
        for part in ("train", "val"):
            assert found[part].keys() == whole[part].keys(), other
            wanted = pytest.approx([*whole[part].values()], abs=1e-10)
            assert [*found[part].values()] == wanted, other
        assert found["parameters"] == pytest.approx(whole["parameters"], abs=1e-10), other


@pytest.mark.parametrize("recipe", [SFT, DPO, "language"])
def test_killed_and_resumed_is_bit_equal(
    recipe: str, results: Callable[[str], dict[str, Any]]
) -> None:
    whole, killed = results(recipe)["world2"], results(recipe)["killed"]
    assert killed["parameters"] == whole["parameters"]
    assert killed["val"] == whole["val"]
