"""Tests the trial of bucket sizes in the first steps, without a network."""

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


def test_candidates_only_for_two_ranks_and_large_gradients() -> None:
    assert [candidate.size for candidate in candidates(48_000_000, 2)] == [
        6_000_000,
        3_000_000,
        1_500_000,
    ]
    assert candidates(48_000_000, 3) == candidates(48_000_000, 16) == []
    assert candidates(400, 2) == []  # too small to be divided


@pytest.mark.parametrize(
    ("setting", "hint"), [("forward", "backward, auto"), ("late", "--overlap auto")]
)
def test_rejects_unknown_overlap(setting: str, hint: str) -> None:
    with pytest.raises(SettingError) as caught:
        validate_overlap(setting)
    assert hint in caught.value.render()
    for valid in ("auto", "backward"):
        validate_overlap(valid)


class RecordingExchange:
    """An exchange that records which bucket sizes are set."""

    reducer: Any = None
    nbytes = 4_000_000

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def set_bucket_sizes(self, size: int, first: int) -> None:
        self.calls.append((size, first))

    def reset(self) -> None:
        self.calls.append("as made")


def run_trial(
    seconds: dict[int, float], *, moving: float = 0.5, ranks: int = 2
) -> tuple[BucketTrial, RecordingExchange, int]:
    """Runs a trial for a model of 4 MB, with the given seconds per step for each bucket size."""
    exchange = RecordingExchange()
    overlap = make_trial(exchange, ranks)
    num_timings = 0
    while not overlap.is_finished:
        step_s = seconds.get(overlap.sizes.size, 1.0)
        parts = torch.zeros(ranks, 5, len(PARTS), dtype=torch.float64)
        parts[:, :, PARTS.index("moving")] = moving * step_s
        parts[:, :, PARTS.index("computing")] = (1 - moving) * step_s
        overlap.consider(
            StepTimings(5 * num_timings, parts, torch.ones(ranks, 5)), 5 * num_timings + 5
        )
        num_timings += 1
        assert num_timings < 12
    return overlap, exchange, num_timings


def make_trial(exchange: RecordingExchange, ranks: int = 2) -> BucketTrial:
    comms = Comms(World(0, ranks), torch.device("cpu"))
    return BucketTrial(cast(GradientExchange, exchange), comms)


def test_no_trial_without_possible_gain() -> None:
    overlap, exchange, num_timings = run_trial({}, moving=0.04)
    assert (overlap.sizes, exchange.calls, num_timings) == (BucketSizes(), [], 1)
    overlap, exchange, num_timings = run_trial({}, ranks=3)
    assert (overlap.sizes, exchange.calls, num_timings) == (BucketSizes(), [], 1)


def test_keeps_fastest_bucket_size() -> None:
    overlap, exchange, _ = run_trial({250_000: 0.8, 125_000: 0.9})
    assert overlap.sizes == BucketSizes(250_000, 65_536)
    sizes = [(500_000, 125_000), (250_000, 65_536), (125_000, 65_536)]
    assert exchange.calls == [*sizes, (250_000, 65_536)]
    assert overlap.summary() == {
        "bucket_bytes": 250_000, "first_bytes": 65_536, "seconds": 0.8, "before": 1.0, "tried": 4
    }  # fmt: skip


@pytest.mark.parametrize("seconds", [{}, {250_000: 0.99}])
def test_keeps_default_without_clear_winner(seconds: dict[int, float]) -> None:
    overlap, exchange, _ = run_trial(seconds)
    assert overlap.sizes == BucketSizes()
    assert exchange.calls[-1] == "as made"


def test_no_trial_for_compressed_gradients() -> None:
    exchange = RecordingExchange()
    exchange.reducer = SimpleNamespace(name="int8")
    overlap = make_trial(exchange)
    assert overlap.is_finished
    assert overlap.state_dict() == {}


def test_checkpoint_restores_bucket_sizes() -> None:
    saved_state = run_trial({125_000: 0.7})[0].state_dict()
    restored = make_trial(exchange := RecordingExchange())
    restored.load_state_dict({**saved_state, "ranks": 3})  # from another number of ranks
    assert not restored.is_finished
    restored.load_state_dict({})  # saved before its end
    assert not restored.is_finished
    restored.load_state_dict(saved_state)
    assert restored.is_finished
    assert restored.sizes == BucketSizes(125_000, 65_536)
    assert exchange.calls == [(125_000, 65_536)]


@pytest.mark.parametrize(
    ("changed", "is_restored"), [({}, True), ({"late": True}, False), ({"code": "int8"}, False)]
)
def test_reads_legacy_checkpoint_state(changed: dict[str, Any], is_restored: bool) -> None:
    state = {"ranks": 2, "code": "", "may_be_late": True, "size": 125_000, "first": 65_536,
             "late": False, "order": [0, 2, 1], **changed}  # fmt: skip
    restored = make_trial(RecordingExchange())
    restored.load_state_dict(state)
    assert (restored.is_finished, restored.sizes == BucketSizes(125_000, 65_536)) == (
        is_restored,
        is_restored,
    )
