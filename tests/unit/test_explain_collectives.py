"""Tests which rank is named if ranks call different collectives, or if one calls none."""

from __future__ import annotations

import importlib

import pytest

from paceline.explain.evidence import Evidence, Log
from paceline.explain.rule import Match
from paceline.spec.events import Event

ALL_REDUCE = (
    'File "/v/site-packages/torch/distributed/distributed_c10d.py", line 2800, in all_reduce'
)
CLOSED_ERROR = "RuntimeError: [/gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:5"
SIZE_ERROR = "RuntimeError: op.preamble.length <= op.nbytes. 66668 vs 4"


def log(rank: int, text: str, line: int = 40) -> Log:
    at = f'  File "/home/me/train.py", line {line}, in step'
    lines = ("Traceback (most recent call last):", at, f"  {ALL_REDUCE}", text)
    return Log(f"n{rank + 1}", rank, lines)


def exited(rank: int, *calls: str, line: int = 0, wait: str = ALL_REDUCE) -> Event:
    stack = [wait, f'File "/home/me/train.py", line {line} in step'] if line else []
    call_fields = {"calls": list(calls)} if calls else {}
    return Event("rank ended", f"n{rank + 1}", rank,
                 fields={"seen": {"state": "S", "stack": stack, **call_fields}})  # fmt: skip


def match_rule(rule: str, *logs: Log, exits: tuple[Event, ...]) -> Match | None:
    module = importlib.import_module(f"paceline.explain.rules.{rule}")
    match = module.match(Evidence(logs=logs, events=exits))
    assert match is None or isinstance(match, Match)
    return match


BARRIER = "0 6 barrier"
LARGE, SMALL = "0 7 all_reduce of [100000]", "0 7 all_reduce of [3]"


def test_mismatch_names_rank_with_different_shape() -> None:
    """The other ranks report nothing, or have continued with the next collective."""
    exits = (exited(0, BARRIER, LARGE), exited(1, BARRIER, SMALL), exited(2, BARRIER, line=40),
            exited(3, BARRIER, LARGE, "0 8 barrier"))  # fmt: skip
    match = match_rule("collective_mismatch", log(0, SIZE_ERROR), log(1, SIZE_ERROR), exits=exits)
    assert match is not None
    assert match.cause.endswith(
        "rank 1 on n2 all_reduce of [3], rank 0 on n1 all_reduce of [100000]"
    )


@pytest.mark.parametrize("num_unreported", [1, 2])
def test_unreported_rank_is_blamed_only_if_unique(num_unreported: int) -> None:
    exits = (
        exited(0, BARRIER, LARGE),
        exited(1, line=40),
        exited(2, *[BARRIER, LARGE][num_unreported - 1 :], line=40),
    )
    if num_unreported == 2:
        exits = (*exits[:2], exited(2, line=40))
    match = match_rule("collective_mismatch", log(0, SIZE_ERROR), exits=exits)
    assert (match is not None) == (num_unreported == 1)
    if match is not None:
        assert "rank 1 on n2" in match.cause
        assert "another shape" in match.cause


@pytest.mark.parametrize(("calls", "is_match"), [(LARGE, True), ("0 7 all_reduce of [3]", False)])
def test_rank_with_small_buffer_is_blamed(calls: str, is_match: bool) -> None:
    """Its buffer error ended it; a third rank, which reports nothing, could be the sender."""
    exits = (exited(0, BARRIER, calls), exited(1, line=40), exited(2))
    match = match_rule(
        "collective_mismatch", log(0, CLOSED_ERROR), Log("n2", 1, (SIZE_ERROR,)), exits=exits
    )
    assert (match is not None) == is_match
    if match is not None:
        assert "rank 1 on n2 all_reduce (train.py, line 40, in step) with another" in match.cause


def test_subsequent_collective_is_not_mismatch() -> None:
    """A rank died; the others notice it in different collectives."""
    exits = (exited(0, BARRIER, LARGE), exited(1, BARRIER, LARGE, "0 8 barrier", line=50))
    match = match_rule("collective_mismatch", log(0, CLOSED_ERROR), exits=exits)
    assert match is None
    exits = (exited(0, BARRIER, LARGE), exited(1, BARRIER, "0 7 barrier", line=50))
    assert match_rule("collective_mismatch", log(0, CLOSED_ERROR), exits=exits) is not None


def test_rank_in_backward_pass_is_not_absent() -> None:
    timed_out = "RuntimeError: [/gloo/unbound_buffer.cc:78] Timed out waiting 4000ms for recv"
    backward = 'File "/v/site-packages/torch/autograd/graph.py", line 9 in _engine_run_backward'
    exits = (
        exited(1, line=39, wait=backward),
        exited(2, line=21, wait='File "/lib/x.py", line 1 in f'),
    )
    match = match_rule("rank_absent", log(0, timed_out), exits=exits)
    assert match is not None
    assert match.cause.startswith("rank 2 on n3")
    assert match_rule("rank_absent", log(0, timed_out), exits=exits[:1]) is None
