"""The trial of bucket sizes in the first steps, without any network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.spec.errors import SettingError
from paceline.spec.training.communication import validate_overlap
from paceline.train.comms import Comms
from paceline.train.measure.pace import PARTS, StepTimings
from paceline.train.reduce.bucket_size import BucketSizes, BucketTrial, candidates
from paceline.train.reduce.exchange import GradientExchange
from paceline.train.world import World


def test_sizes_are_tried_only_where_they_change_no_result() -> None:
    assert [one.size for one in candidates(48_000_000, 2)] == [6_000_000, 3_000_000, 1_500_000]
    assert candidates(48_000_000, 3) == candidates(48_000_000, 16) == []
    assert candidates(400, 2) == []  # nothing to divide


@pytest.mark.parametrize(
    ("asked", "told"), [("forward", "backward, auto"), ("late", "--overlap auto")]
)
def test_an_unknown_way_is_refused(asked: str, told: str) -> None:
    with pytest.raises(SettingError) as caught:
        validate_overlap(asked)
    assert told in caught.value.render()
    for known in ("auto", "backward"):
        validate_overlap(known)


class RecordingExchange:
    """An exchange that records which buckets it is given."""

    reducer: Any = None
    nbytes = 4_000_000

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def set_bucket_sizes(self, size: int, first: int) -> None:
        self.calls.append((size, first))

    def reset(self) -> None:
        self.calls.append("as made")


def trial(
    seconds: dict[int, float], *, moving: float = 0.5, ranks: int = 2
) -> tuple[BucketTrial, RecordingExchange, int]:
    """A whole trial of a model of 4 MB, with steps of so many seconds by size of buckets."""
    exchange = RecordingExchange()
    overlap = overlap_of(exchange, ranks)
    looks = 0
    while not overlap.is_finished:
        a_step = seconds.get(overlap.sizes.size, 1.0)
        parts = torch.zeros(ranks, 5, len(PARTS), dtype=torch.float64)
        parts[:, :, PARTS.index("moving")] = moving * a_step
        parts[:, :, PARTS.index("computing")] = (1 - moving) * a_step
        overlap.consider(StepTimings(5 * looks, parts, torch.ones(ranks, 5)), 5 * looks + 5)
        looks += 1
        assert looks < 12
    return overlap, exchange, looks


def overlap_of(exchange: RecordingExchange, ranks: int = 2) -> BucketTrial:
    comms = Comms(World(0, ranks), torch.device("cpu"))
    return BucketTrial(cast(GradientExchange, exchange), comms)


def test_nothing_is_tried_where_nothing_can_be_won() -> None:
    overlap, exchange, looks = trial({}, moving=0.04)
    assert (overlap.sizes, exchange.calls, looks) == (BucketSizes(), [], 1)
    overlap, exchange, looks = trial({}, ranks=3)
    assert (overlap.sizes, exchange.calls, looks) == (BucketSizes(), [], 1)


def test_the_quickest_is_kept() -> None:
    overlap, exchange, _ = trial({250_000: 0.8, 125_000: 0.9})
    assert overlap.sizes == BucketSizes(250_000, 65_536)
    sizes = [(500_000, 125_000), (250_000, 65_536), (125_000, 65_536)]
    assert exchange.calls == [*sizes, (250_000, 65_536)]
    assert overlap.summary() == {
        "bucket_bytes": 250_000, "first_bytes": 65_536, "seconds": 0.8, "before": 1.0, "tried": 4
    }  # fmt: skip


@pytest.mark.parametrize("seconds", [{}, {250_000: 0.99}])
def test_without_a_clear_winner_all_is_as_before(seconds: dict[int, float]) -> None:
    overlap, exchange, _ = trial(seconds)
    assert overlap.sizes == BucketSizes()
    assert exchange.calls[-1] == "as made"


def test_where_gradients_are_coded_no_sizes_are_tried() -> None:
    exchange = RecordingExchange()
    exchange.reducer = SimpleNamespace(name="int8")
    overlap = overlap_of(exchange)
    assert overlap.is_finished
    assert overlap.state_dict() == {}


def test_a_checkpoint_knows_the_sizes() -> None:
    kept = trial({125_000: 0.7})[0].state_dict()
    again = overlap_of(exchange := RecordingExchange())
    again.load_state_dict({**kept, "ranks": 3})  # found elsewhere
    assert not again.is_finished
    again.load_state_dict({})  # from a time before its end
    assert not again.is_finished
    again.load_state_dict(kept)
    assert again.is_finished
    assert again.sizes == BucketSizes(125_000, 65_536)
    assert exchange.calls == [(125_000, 65_536)]


@pytest.mark.parametrize(
    ("changed", "done"), [({}, True), ({"late": True}, False), ({"code": "int8"}, False)]
)
def test_a_checkpoint_of_an_earlier_version_is_read(changed: dict[str, Any], done: bool) -> None:
    state = {"ranks": 2, "code": "", "may_be_late": True, "size": 125_000, "first": 65_536,
             "late": False, "order": [0, 2, 1], **changed}  # fmt: skip
    again = overlap_of(RecordingExchange())
    again.load_state_dict(state)
    assert (again.is_finished, again.sizes == BucketSizes(125_000, 65_536)) == (done, done)
