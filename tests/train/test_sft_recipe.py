"""Fine-tuning on several ranks: the same result on any number, packed or not, killed or not."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

lacks_peft = importlib.util.find_spec("peft") is None  # to import it takes every worker seconds
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(lacks_peft, reason="peft is not installed"),
]
SCRIPT = str(Path(__file__).parent / "sft_worlds.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sft")
    ended = ranks.run_script([SCRIPT, str(folder)], folder / "logs", timeout=500)
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return found


@pytest.mark.parametrize("other", ["world2", "world3", "single_rows", "recomputed", "killed"])
def test_ends_as_on_one_rank(other: str, results: dict[str, Any]) -> None:
    whole, found = results["world1"], results[other]
    assert len(whole["train"]) == 8
    for part in ("train", "val"):
        assert found[part].keys() == whole[part].keys()
        assert [*found[part].values()] == pytest.approx([*whole[part].values()], abs=1e-10)
    assert found["parameters"] == pytest.approx(whole["parameters"], abs=1e-10)


def test_killed_and_resumed_is_bit_equal(results: dict[str, Any]) -> None:
    whole, killed = results["world2"], results["killed"]
    assert killed["parameters"] == whole["parameters"]
    assert killed["val"] == whole["val"]
