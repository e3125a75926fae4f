"""Who came to another collective than the others, or not at all, as far as that is known."""

from __future__ import annotations

import importlib

import pytest

from paceline.explain.evidence import Evidence, Log
from paceline.explain.rule import Match
from paceline.spec.events import Event

ALL_REDUCE = (
    'File "/v/site-packages/torch/distributed/distributed_c10d.py", line 2800, in all_reduce'
)
GONE = "RuntimeError: [/gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:5"
SIZES = "RuntimeError: op.preamble.length <= op.nbytes. 66668 vs 4"


def log(rank: int, text: str, line: int = 40) -> Log:
    at = f'  File "/home/me/train.py", line {line}, in step'
    lines = ("Traceback (most recent call last):", at, f"  {ALL_REDUCE}", text)
    return Log(f"n{rank + 1}", rank, lines)


def end(rank: int, *calls: str, line: int = 0, wait: str = ALL_REDUCE) -> Event:
    stack = [wait, f'File "/home/me/train.py", line {line} in step'] if line else []
    told = {"calls": list(calls)} if calls else {}
    return Event("rank ended", f"n{rank + 1}", rank,
                 fields={"seen": {"state": "S", "stack": stack, **told}})  # fmt: skip


def concluded(rule: str, *logs: Log, ends: tuple[Event, ...]) -> Match | None:
    module = importlib.import_module(f"paceline.explain.rules.{rule}")
    match = module.match(Evidence(logs=logs, events=ends))
    assert match is None or isinstance(match, Match)
    return match


BEGAN = "0 6 barrier"
MANY, FEW = "0 7 all_reduce of [100000]", "0 7 all_reduce of [3]"


def test_another_shape_is_named_of_who_came_with_it() -> None:
    """Others of the same shape were not heard of for a while, or have gone on to the next."""
    ends = (end(0, BEGAN, MANY), end(1, BEGAN, FEW), end(2, BEGAN, line=40),
            end(3, BEGAN, MANY, "0 8 barrier"))  # fmt: skip
    match = concluded("collective_mismatch", log(0, SIZES), log(1, SIZES), ends=ends)
    assert match is not None
    assert match.cause.endswith(
        "rank 1 on n2 all_reduce of [3], rank 0 on n1 all_reduce of [100000]"
    )


@pytest.mark.parametrize("silent", [1, 2])
def test_who_tells_nothing_is_the_odd_one_only_if_nobody_else_can_be(silent: int) -> None:
    ends = (end(0, BEGAN, MANY), end(1, line=40), end(2, *[BEGAN, MANY][silent - 1 :], line=40))
    if silent == 2:
        ends = (*ends[:2], end(2, line=40))
    match = concluded("collective_mismatch", log(0, SIZES), ends=ends)
    assert (match is not None) == (silent == 1)
    if match is not None:
        assert "rank 1 on n2" in match.cause
        assert "another shape" in match.cause


@pytest.mark.parametrize(("calls", "odd"), [(MANY, True), ("0 7 all_reduce of [3]", False)])
def test_who_had_too_little_room_for_what_another_has_is_the_odd_one(calls: str, odd: bool) -> None:
    """It died of that, and a third one tells nothing: that could be who sent too much."""
    ends = (end(0, BEGAN, calls), end(1, line=40), end(2))
    match = concluded("collective_mismatch", log(0, GONE), Log("n2", 1, (SIZES,)), ends=ends)
    assert (match is not None) == odd
    if match is not None:
        assert "rank 1 on n2 all_reduce (train.py, line 40, in step) with another" in match.cause


def test_ranks_of_different_moments_have_not_called_different_collectives() -> None:
    """One has died; one hears of it in this collective, one in the next."""
    ends = (end(0, BEGAN, MANY), end(1, BEGAN, MANY, "0 8 barrier", line=50))
    match = concluded("collective_mismatch", log(0, GONE), ends=ends)
    assert match is None
    ends = (end(0, BEGAN, MANY), end(1, BEGAN, "0 7 barrier", line=50))
    assert concluded("collective_mismatch", log(0, GONE), ends=ends) is not None


def test_who_waits_in_a_backward_pass_is_not_absent() -> None:
    timed_out = "RuntimeError: [/gloo/unbound_buffer.cc:78] Timed out waiting 4000ms for recv"
    backward = 'File "/v/site-packages/torch/autograd/graph.py", line 9 in _engine_run_backward'
    ends = (end(1, line=39, wait=backward), end(2, line=21, wait='File "/lib/x.py", line 1 in f'))
    match = concluded("rank_absent", log(0, timed_out), ends=ends)
    assert match is not None
    assert match.cause.startswith("rank 2 on n3")
    assert concluded("rank_absent", log(0, timed_out), ends=ends[:1]) is None
