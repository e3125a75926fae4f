"""Tests the launcher's explanation of step timings of a script's replicas."""

from __future__ import annotations

import pytest

from paceline.launch.health import script_timings
from paceline.launch.health.script_timings import ScriptTimings
from paceline.spec.events import Event


def describe_stalls(*stalls_s: float, step_s: float = 1.0, method: str = "exact",
              size: int = 10_000_000) -> list[str]:  # fmt: skip
    timings = ScriptTimings()
    for rank, stall_s in enumerate(stalls_s):
        fields = {
            "replica": 0, "step": 6, "members": [*range(len(stalls_s))], "bytes": size,
            "seconds": step_s, "moving_s": min(stalls_s) + 0.1, "stall_s": stall_s,
        }  # fmt: skip
        timings.add(Event(script_timings.REPORT, f"n{rank + 1}", rank, 0.0, fields))
    return [*timings.describe(2, method)]


def test_saturated_link_suggests_compression() -> None:
    assert describe_stalls(0.7, 0.7) == [
        "70% of each 1 s step goes into sending 10.0 MB of gradients, at 100 Mbit/s: 2 hosts train"
        " slower than one would. With --communication int8 a step would take at least 0.482 s"
    ]


def test_partly_saturated_link_is_not_called_slower() -> None:
    (text,) = describe_stalls(0.4, 0.4)
    assert "slower than one" not in text
    assert "--communication int8 a step would take at least 0.704 s" in text


def test_names_compression_in_use() -> None:
    assert describe_stalls(0.4, 0.4, method="int4") == [
        "40% of each 1 s step goes into sending gradients, by --communication int4"
    ]


def test_names_slowest_rank() -> None:
    assert describe_stalls(0.05, 0.45) == [
        "rank 0 on n1 is the slowest: the others wait up to 0.4 s of each 1 s step for it"
    ]


@pytest.mark.parametrize("stalls_s", [(0.1, 0.12), (0.7,), (0.7, 0.7, 0.7)])
def test_no_message_for_small_or_incomplete_stalls(stalls_s: tuple[float, ...]) -> None:
    """No message if waits are short, or if a rank has not reported or does not exist."""
    assert describe_stalls(*stalls_s) == []


def test_no_message_for_small_gradients() -> None:
    assert describe_stalls(0.7, 0.7, size=60_000) == []


def test_wait_is_capped_at_step_time() -> None:
    (text,) = describe_stalls(0.0, 2.5)
    assert text.endswith("the others wait up to 1 s of each 1 s step for it")


def test_no_message_for_short_steps() -> None:
    assert describe_stalls(0.007, 0.007, step_s=0.01) == []


def test_timings_in_memory_are_bounded() -> None:
    timings = ScriptTimings()
    for replica in range(2 * script_timings.MAX_MODELS):
        fields = dict.fromkeys(("step", "bytes", "seconds", "moving_s", "stall_s"), 1)
        fields |= {"replica": replica, "members": [*range(1000)]}
        timings.add(Event(script_timings.REPORT, "n1", 0, 0.0, fields))
    assert len(timings._reports) == script_timings.MAX_MODELS
    assert timings._reports[0][0]["members"] is None
