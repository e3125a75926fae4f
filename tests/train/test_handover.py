"""A training's state from one rank's memory into another's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import ranks

from paceline.spec.failure import SECONDARY_ERROR

SCRIPT = str(Path(__file__).with_name("handing.py"))
Record = dict[str, Any]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    ranks.run_ok(1, [SCRIPT, str(folder)], folder)
    return folder


def read(folder: Path) -> list[Record]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize(
    "name", ["afresh", "behind", "in small pieces", "two models", "beside who idles"]
)
def test_the_taker_has_the_givers_state_and_nobody_else(worlds: Path, name: str) -> None:
    first, giver, taker = read(worlds / name)
    assert taker["before"] != giver["before"]
    assert taker["after"] == giver["after"] == giver["before"]
    assert first["after"]["at"] == first["before"]["at"]
    assert first["after"]["best"] == first["before"]["best"]
    assert not taker["problem"]


@pytest.mark.parametrize("name", ["shrunk", "slowed", "left alone", "rewritten at first"])
def test_models_are_given_as_a_step_left_them(worlds: Path, name: str) -> None:
    """What the giver did to them afterwards the taker will do itself."""
    _, giver, taker = read(worlds / name)
    assert not taker["problem"]
    assert taker["before"] != giver["before"]
    for part in ("module", "models"):
        before, changed, after = (
            _without_statistics(giver[when]["state"][part])
            for when in ("before", "changed", "after")
        )
        assert _without_statistics(taker["after"]["state"][part]) == before
        assert after == changed
        assert changed == before or name != "left alone"


def _without_statistics(state: Record) -> Record:
    """The next forward pass has begun, which writes them."""
    return {name: one for name, one in state.items() if ".norm." not in name}


def test_generators_stay_a_ranks_own(worlds: Path) -> None:
    """The same numbers on two ranks would be the same dropout."""
    _, giver, taker = read(worlds / "afresh")
    assert taker["next"] != giver["next"]
    again = read(worlds / "in small pieces")[2]
    assert again["next"] == taker["next"]  # given by seed, step and rank


def test_what_ranks_measured_is_counted_once(worlds: Path) -> None:
    """A new rank has measured nothing, and would wait for nobody at the next record."""
    for one in read(worlds / "afresh"):
        assert one["open"]["count"] == 4
        assert one["open"]["sums"] == {"loss": 8.0}


def test_a_wrong_bit_is_an_error_on_every_rank_and_taken_by_none(worlds: Path) -> None:
    found = read(worlds / "wrong")
    assert all("received another state than it was sent" in one["problem"] for one in found)
    assert "rank 2 on" in found[0]["problem"]
    taker = found[2]
    assert taker["after"] == taker["before"]


def test_another_training_is_refused(worlds: Path) -> None:
    for one in read(worlds / "another"):
        assert "runs another training\nsize: 3 there, 4 here" in one["problem"]


def test_a_newcomer_that_cannot_take_it_fails_alone(worlds: Path) -> None:
    """The others find it gone, which they go on without; its error would be theirs for good."""
    *others, taker = read(worlds / "another afresh")
    assert "runs another training\nsize: 3 there, 4 here" in taker["problem"]
    for one in others:
        assert SECONDARY_ERROR.search(one["problem"])
        assert "another training" not in one["problem"]


def test_a_place_with_another_loader_is_refused(worlds: Path) -> None:
    found = read(worlds / "another loader")
    for one in found:
        assert "training samples: 100 of Samples there, 200 of Other here" in one["problem"]
    assert found[2]["after"] == found[2]["before"]


def test_memory_grows_by_pieces_only(worlds: Path) -> None:
    for rank in range(2):
        assert json.loads((worlds / "grown" / f"{rank}.json").read_text()) < 72  # of 96 MB
