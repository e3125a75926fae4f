"""Tests how the launcher compares the first batches of ranks."""

from __future__ import annotations

from paceline.launch.health import inputs
from paceline.launch.health.inputs import InputComparison
from paceline.spec.events import Event


def report(rank: int, *batches: str, replica: int = 0) -> Event:
    fields = {"replica": replica, "members": [0, 1], "batches": [*batches]}
    return Event("replica inputs", f"n{rank}", rank, 0.0, fields)


def test_warns_once_of_equal_batches() -> None:
    comparison = InputComparison()
    assert not comparison.add(report(0, "a", "b"))
    assert comparison.add(report(1, "a", "b")).startswith("all 2 ranks got the same batches")
    assert not comparison.add(report(0, "a", "b", replica=1))
    assert not comparison.add(report(1, "a", "b", replica=1))


def test_different_or_constant_batches_are_no_problem() -> None:
    comparison = InputComparison()
    cases = [("aa", "aa"), ("ab", "ac"), ("ab", "ab")]  # the last ones: noise, for example
    for replica, (first, second) in enumerate(cases):
        assert not comparison.add(report(0, *first, replica=replica))
        assert not comparison.add(report(1, *second, replica=replica))


def test_warns_once_of_same_order() -> None:
    comparison = InputComparison()
    texts = [comparison.add(Event(inputs.SAME_ORDER, "n1", 0)) for _ in range(2)]
    assert "set_epoch" in texts[0]
    assert not texts[1]


def test_reports_without_counterpart_are_dropped() -> None:
    comparison = InputComparison()
    for replica in range(2 * inputs.MAX_PENDING):
        comparison.add(report(0, "a", "b", replica=replica))
    assert len(comparison._pending) == inputs.MAX_PENDING
