"""Whether an attempt has anything to lose yet, and whose fault a loss is."""

from __future__ import annotations

from typing import Any

import pytest

from each_case import each_case
from paceline.launch.elastic.retry_policy import StartupTracker, is_by_chance
from paceline.spec.events import Event
from paceline.spec.failure import LAUNCHER_HOST, Failure, describe_end
from paceline.spec.job import Entry, Job

SESSION = ("torch", "paceline.train?")
STARTED = ("rank started", {"rank": 1, "pid": 7})
WROTE = ("output", {"stream": "out"})
MET = ("world joined", {"world_size": 2})
JOINED = ("joined", {"world": 2})
ABLE = ("recoverable", {"able": True})


def job(kind: Any = "script", **more: Any) -> Job:
    return Job("a", Entry(kind, "train.py"), "/", "python3", **more)


def over(job: Job, *told: tuple[str, dict[str, Any]], ranks: int = 2) -> bool:
    startup = StartupTracker(job, ranks)
    for kind, fields in told:
        startup.on_event(Event(kind, "n1", 1, 0.0, fields))
    return startup.has_work_to_lose


def beat(step: int, phase: str = "train") -> tuple[str, dict[str, Any]]:
    return "heartbeat", {"step": step, "phase": phase}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], False),
        ([STARTED, WROTE, MET, JOINED, beat(0, "start"), ABLE], False),
        ([STARTED, JOINED, beat(1)], True),
        ([STARTED, JOINED, ("progress", {"step": 1})], True),
        # goes on from a checkpoint: its step may be told before it is known where that was
        ([STARTED, JOINED, beat(500, "load a checkpoint"), ("resumed", {"step": 500})], False),
        ([STARTED, JOINED, ("resumed", {"step": 500}), beat(501)], True),
    ],
)
def test_a_session_is_known_by_its_steps(told: list[Any], expected: bool) -> None:
    assert over(job(preload=SESSION), *told) == expected


def test_a_script_turns_out_to_be_a_session() -> None:
    assert over(job(), STARTED, WROTE)
    assert not over(job(), STARTED, WROTE, JOINED)
    assert not over(job(needs_torch=False), STARTED, WROTE, ABLE)


@pytest.mark.parametrize(
    ("told", "expected"),
    [([], False), ([STARTED], False), ([STARTED, WROTE], True), ([STARTED, MET], True)],
)
def test_a_script_is_at_its_beginning_until_it_shows(told: list[Any], expected: bool) -> None:
    assert over(job(), *told) == expected


@pytest.mark.parametrize(
    ("alone", "ranks"),
    [
        (job(), 1), (job("binary"), 2), (job("function"), 2), (job(needs_torch=False), 2),
        (job(opens_store=True), 2),
    ],
)  # fmt: skip
def test_what_needs_no_others_may_do_anything_once_it_runs(alone: Job, ranks: int) -> None:
    assert not over(alone, ranks=ranks)
    assert over(alone, STARTED, ranks=ranks)


def ended(signum: int, memory: dict[str, Any] | None = None) -> Failure:
    headline = describe_end(None, signum, memory)
    return Failure("signal", "n1", 1, signal=signum, headline=headline)


@each_case(
    ("failure", "expected"),
    [
        (ended(9), True),
        (ended(1), True),
        (ended(15), False),
        (ended(11), False),
        (ended(6), False),
        (ended(9, {"kills": 1, "kernel": True}), False),
        (Failure("lost", "n1", None, headline="no word"), True),
        (Failure("agent", "n1", None, headline="its guard was killed"), True),
        (Failure("forkserver", "n1", None, headline="killed"), True),
        (Failure("launcher", LAUNCHER_HOST, None, headline="this launcher was stopped"), True),
        (Failure("exception", "n1", 1, headline="ValueError: boom"), False),
        (Failure("exit", "n1", 1, code=7, headline="exit status 7"), False),
        (Failure("hang", "n1", 1, headline="hung"), False),
        (Failure("early", "n1", 1, code=0), False),
    ],
)
def test_what_is_nobodys_fault(failure: Failure, expected: bool) -> None:
    assert is_by_chance(failure) == expected
