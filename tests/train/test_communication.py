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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all ways led to, in one process that forks."""
    folder = tmp_path_factory.mktemp("communicating")
    ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.fixture(scope="module")
def owing(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "owing.json").read_text()))


def test_resumed_to_the_bit(found: Any) -> None:
    assert {name: one["equal"] for name, one in found.items()} == dict.fromkeys(found, True)


def test_the_loss_is_that_of_exact_averages(found: Any) -> None:
    exact = found["exact"]["loss"]
    for name in ("fp16", "bf16", "int8", "int4"):
        assert found[name]["loss"] == pytest.approx(exact, abs=0.05), name
    assert found["local"]["loss"] == pytest.approx(exact, abs=0.5)  # and says so


def test_only_what_a_lost_rank_had_not_said_is_lost(owing: Any) -> None:
    """What the parameters got is what all computed, without what is left to say at the end."""
    for name, one in owing.items():
        assert set(one["statuses"].values()) <= {0, -9}, name
        assert one["off"] < 0.1 * one["lost"], name  # half a percent of it is bfloat16's
        assert one["owed"] > 0, name
        assert len(one["joined"]) == ("behind" not in name), name
