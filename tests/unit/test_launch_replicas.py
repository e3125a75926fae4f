"""Tests how the launcher compares checksums of replicas."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.launch.health import replicas
from paceline.launch.health.replicas import ReplicaComparison
from paceline.spec.events import Event


def report(rank: int, *values: str, step: int = 0, members: int = 3, **other: Any) -> Event:
    sums = [{"name": f"layer{number}", "value": value} for number, value in enumerate(values)]
    fields = {"replica": 0, "step": step, "members": [*range(members)], "first": 0, "sums": sums}
    return Event(replicas.REPORT, f"n{rank}", rank, 0.0, fields | other)


def test_equal_replicas() -> None:
    comparison = ReplicaComparison()
    for step in (0, 16):
        for rank in (2, 0, 1):
            assert comparison.add(report(rank, "a", "b", step=step)) is None
    assert not comparison._pending


def test_differing_rank_is_named_once_with_first_parameter() -> None:
    comparison = ReplicaComparison()
    assert comparison.add(report(0, "a", "b", "c", step=16)) is None
    assert comparison.add(report(1, "a", "x", "y", step=16)) is None
    difference = comparison.add(report(2, "a", "b", "c", step=16))
    assert difference is not None
    assert difference[:4] == (16, "n1", 1, "layer1")
    assert difference.text == (
        "rank 1 on n1 trains a different model from the others: layer1 differs after step 16"
    )
    for rank in range(3):
        assert comparison.add(report(rank, f"{rank}", step=32)) is None


def test_two_ranks_have_no_majority() -> None:
    comparison = ReplicaComparison()
    assert comparison.add(report(0, "a", members=2)) is None
    difference = comparison.add(report(1, "b", members=2))
    assert difference is not None
    assert difference[:4] == (0, "n1", 1, "layer0")
    assert difference.text == (
        "rank 0 on n0, rank 1 on n1 train different models: layer0 differs before the first step"
    )


@pytest.mark.parametrize(
    ("step", "exchanges", "expected"),
    [
        (16, (False, False), True),
        (16, (False, True), False),
        (16, (None, None), False),  # an older rank does not tell
        (0, (False, False), False),  # nothing was exchanged yet
    ],
)
def test_difference_without_exchange_is_explained(
    step: int, exchanges: tuple[bool | None, bool | None], expected: bool
) -> None:
    comparison = ReplicaComparison()
    for rank, value in enumerate(exchanges):
        difference = comparison.add(report(rank, f"{rank}", step=step, members=2, exchanges=value))
    assert difference is not None
    explanation = "exchanged no gradients: the script has to call the DistributedDataParallel"
    assert (explanation in difference.text) is expected


def test_does_not_compare_different_steps_or_models() -> None:
    comparison = ReplicaComparison()
    for rank, other in enumerate(({"step": 16}, {"step": 32}, {"replica": 1}, {"first": 25})):
        assert comparison.add(report(rank % 2, f"{rank}", members=2, **other)) is None


def test_does_not_compare_different_groups() -> None:
    comparison = ReplicaComparison()
    for rank, value in ((0, "a"), (2, "b"), (1, "a"), (3, "b")):
        group = [0, 1] if rank < 2 else [2, 3]
        report_of_group = Event(
            replicas.REPORT, f"n{rank}", rank, 0.0, {**report(rank, value).fields, "members": group}
        )
        assert comparison.add(report_of_group) is None
    assert not comparison._pending


def test_drops_incomplete_reports(monkeypatch: Any) -> None:
    monkeypatch.setattr(replicas, "MAX_PENDING", 5)
    comparison = ReplicaComparison()
    for step in range(20):
        comparison.add(report(0, "a", step=step))
    assert [step for _, _, step, _ in comparison._pending] == [15, 16, 17, 18, 19]


def test_large_reports_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of 1,000 of each group report. A complete comparison frees its memory."""
    monkeypatch.setattr(replicas, "MAX_PENDING_BYTES", 1 << 20)
    comparison = ReplicaComparison()
    for number in range(100):
        for rank in range(2):
            comparison.add(report(rank, "x" * 5000, step=number, members=1000))
    assert 1 < len(comparison._pending) < 20
    assert [*comparison._pending] == [*comparison._pending_bytes]
    for rank in range(3):
        comparison.add(report(rank, "x" * 5000, step=200))
    assert [*comparison._pending] == [*comparison._pending_bytes]
    comparison.add(report(0, "x" * (2 << 20)))
    assert not comparison._pending
