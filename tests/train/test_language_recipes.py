"""Tests language models on several ranks: same result for any number, packed, killed or not."""

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
import local_ranks

lacks_peft = importlib.util.find_spec("peft") is None  # importing it takes each worker seconds
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
    """Returns a function that returns a recipe's trainings by name, run at its first call."""

    @functools.cache
    def run(recipe: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(recipe)
        script = str(Path(__file__).parent / f"{recipe}_worlds.py")
        ended = local_ranks.run_script([script, str(folder)], folder / "logs", timeout=500)
        result: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
        return result

    return run


@pytest.mark.parametrize("recipe", [SFT, DPO, "language"])
def test_results_match_single_rank(recipe: str, results: Callable[[str], dict[str, Any]]) -> None:
    reference = results(recipe)["world1"]
    assert len(reference["train"]) == 8
    for world in WORLDS[recipe]:
        result = results(recipe)[world]
        for part in ("train", "val"):
            assert result[part].keys() == reference[part].keys(), world
            expected = pytest.approx([*reference[part].values()], abs=1e-10)
            assert [*result[part].values()] == expected, world
        assert result["parameters"] == pytest.approx(reference["parameters"], abs=1e-10), world


@pytest.mark.parametrize("recipe", [SFT, DPO, "language"])
def test_killed_run_resumes_bit_exact(
    recipe: str, results: Callable[[str], dict[str, Any]]
) -> None:
    reference, killed = results(recipe)["world2"], results(recipe)["killed"]
    assert killed["parameters"] == reference["parameters"]
    assert killed["val"] == reference["val"]
