"""Gradients in fewer bytes: as good a training, the same on all ranks, and resumed to the bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

SCRIPT = str(Path(__file__).with_name("communicating.py"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all ways led to, in one process that forks."""
    folder = tmp_path_factory.mktemp("communicating")
    ranks.run_ok(1, [SCRIPT, str(folder)], folder, timeout=200)
    return dict(json.loads((folder / "found.json").read_text()))


def test_resumed_to_the_bit(found: Any) -> None:
    assert {name: one["equal"] for name, one in found.items()} == dict.fromkeys(found, True)


def test_the_loss_is_that_of_exact_averages(found: Any) -> None:
    exact = found["exact"]["loss"]
    for name in ("fp16", "bf16", "int8", "int4", "powersgd"):
        assert found[name]["loss"] == pytest.approx(exact, abs=0.05), name
    assert found["local"]["loss"] == pytest.approx(exact, abs=0.5)  # and says so
