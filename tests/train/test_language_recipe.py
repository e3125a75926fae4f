"""From-scratch training on several ranks: the same result on any number, killed or not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).parent / "language_worlds.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("language")
    (ended,) = ranks.run_ok(1, [SCRIPT, str(folder)], folder / "logs", timeout=500)
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return found


@pytest.mark.parametrize("other", ["world2", "world3", "killed"])
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
