"""Tests the transfer of a training's state from one rank's memory to another rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

from paceline.spec.failure import SECONDARY_ERROR

SCRIPT = str(Path(__file__).with_name("handover_worlds.py"))
Record = dict[str, Any]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    local_ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return folder


def read(folder: Path) -> list[Record]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize(
    "name", ["afresh", "behind", "in small pieces", "two models", "beside who idles"]
)
def test_only_receiver_gets_sender_state(worlds: Path, name: str) -> None:
    first, sender, receiver = read(worlds / name)
    assert receiver["before"] != sender["before"]
    assert receiver["after"] == sender["after"] == sender["before"]
    assert first["after"]["at"] == first["before"]["at"]
    assert first["after"]["best"] == first["before"]["best"]
    assert not receiver["problem"]


@pytest.mark.parametrize("name", ["shrunk", "slowed", "left alone", "rewritten at first"])
def test_sends_models_as_of_last_step(worlds: Path, name: str) -> None:
    """The receiver itself repeats what the sender changed after the step."""
    _, sender, receiver = read(worlds / name)
    assert not receiver["problem"]
    assert receiver["before"] != sender["before"]
    for part in ("module", "models"):
        before, changed, after = (
            _without_statistics(sender[when]["state"][part])
            for when in ("before", "changed", "after")
        )
        assert _without_statistics(receiver["after"]["state"][part]) == before
        assert after == changed
        assert changed == before or name != "left alone"


def _without_statistics(state: Record) -> Record:
    """Removes batch statistics, which the forward pass of the next step has changed."""
    return {name: record for name, record in state.items() if ".norm." not in name}


def test_random_generators_stay_per_rank(worlds: Path) -> None:
    """The same random numbers on two ranks would mean the same dropout."""
    _, sender, receiver = read(worlds / "afresh")
    assert receiver["next"] != sender["next"]
    other_receiver = read(worlds / "in small pieces")[2]
    assert other_receiver["next"] == receiver["next"]  # seeded by seed, step and rank


def test_measurements_are_counted_once(worlds: Path) -> None:
    """A new rank has measured nothing and contributes nothing to the next record."""
    for record in read(worlds / "afresh"):
        assert record["open"]["count"] == 4
        assert record["open"]["sums"] == {"loss": 8.0}


def test_corrupt_state_fails_ranks_and_is_not_loaded(worlds: Path) -> None:
    records = read(worlds / "wrong")
    assert all("received another state than it was sent" in record["problem"] for record in records)
    assert "rank 2 on" in records[0]["problem"]
    receiver = records[2]
    assert receiver["after"] == receiver["before"]


def test_rejects_state_of_other_training(worlds: Path) -> None:
    for record in read(worlds / "another"):
        assert "runs another training\nsize: 3 there, 4 here" in record["problem"]


def test_incompatible_newcomer_is_not_blamed_on_peers(worlds: Path) -> None:
    """The others see a lost rank, from which they recover; an error of theirs would end the job."""
    *peers, receiver = read(worlds / "another afresh")
    assert "runs another training\nsize: 3 there, 4 here" in receiver["problem"]
    for record in peers:
        assert SECONDARY_ERROR.search(record["problem"])
        assert "another training" not in record["problem"]


def test_rejects_position_of_other_loader(worlds: Path) -> None:
    records = read(worlds / "another loader")
    for record in records:
        assert "training samples: 100 of Samples there, 200 of Other here" in record["problem"]
    assert records[2]["after"] == records[2]["before"]


def test_transfer_memory_is_bounded(worlds: Path) -> None:
    for rank in range(2):
        assert json.loads((worlds / "grown" / f"{rank}.json").read_text()) < 72  # of 96 MB
