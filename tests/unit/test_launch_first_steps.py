"""Tests whether an attempt has work to lose, and whether a failure happened by chance."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
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
JOINING = ("joining", {})
WORLD_JOINED = ("world joined", {"world_size": 2})
JOINED = ("joined", {"world": 2})
RECOVERABLE = ("recoverable", {"able": True})


def job(kind: Any = "script", **options: Any) -> Job:
    return Job("a", Entry(kind, "train.py"), "/", "python3", **options)


def can_lose_work(job: Job, *reports: tuple[str, dict[str, Any]]) -> bool:
    startup = StartupTracker(job)
    for kind, fields in reports:
        startup.on_event(Event(kind, "n1", 1, 0.0, fields))
    return startup.has_work_to_lose


def beat(step: int, phase: str = "train") -> tuple[str, dict[str, Any]]:
    return "heartbeat", {"step": step, "phase": phase}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], False),
        ([STARTED, WROTE, JOINING], False),
        ([STARTED, WROTE, JOINING, WORLD_JOINED, JOINED, beat(0, "start"), RECOVERABLE], False),
        ([STARTED, JOINED, beat(1)], True),
        ([STARTED, JOINED, ("progress", {"step": 1})], True),
        # resumes from a checkpoint, whose step may be reported before the resume event
        ([STARTED, JOINED, beat(500, "load a checkpoint"), ("resumed", {"step": 500})], False),
        ([STARTED, JOINED, ("resumed", {"step": 500}), beat(501)], True),
    ],
)
def test_session_has_work_to_lose_after_first_step(reports: list[Any], expected: bool) -> None:
    assert can_lose_work(job(preload=SESSION), *reports) == expected


def test_script_that_joins_is_treated_as_session() -> None:
    assert can_lose_work(job(), STARTED, WROTE)
    assert not can_lose_work(job(), STARTED, WROTE, JOINED)
    assert not can_lose_work(job(needs_torch=False), STARTED, WROTE, RECOVERABLE)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], False),
        ([STARTED, JOINING], False),
        ([JOINING, STARTED], False),  # they come by different ways
        ([STARTED, JOINING, WROTE], True),
        ([STARTED, JOINING, WORLD_JOINED], True),
    ],
)
def test_joining_script_has_work_to_lose_once_it_prints_or_connects(
    reports: list[Any], expected: bool
) -> None:
    assert can_lose_work(job(), *reports) == expected


@each_case(
    "working_job",
    [
        job(), job("binary"), job("function"), job(needs_torch=False), job(opens_store=True),
        job("function", preload=SESSION),  # it only launches others: it imports paceline
    ],
)  # fmt: skip
def test_program_outside_of_groups_has_work_to_lose_once_started(working_job: Job) -> None:
    assert not can_lose_work(working_job)
    assert can_lose_work(working_job, STARTED)


def test_one_rank_outside_of_groups_has_work_to_lose() -> None:
    startup = StartupTracker(job())
    for kind, rank in (("rank started", 0), ("rank started", 1), ("joining", 0)):
        startup.on_event(Event(kind, "n1", rank))
    assert startup.has_work_to_lose


def signal_failure(signum: int, memory: dict[str, Any] | None = None) -> Failure:
    headline = describe_end(None, signum, memory)
    return Failure("signal", "n1", 1, signal=signum, headline=headline)


@each_case(
    ("failure", "expected"),
    [
        (signal_failure(9), True),
        (signal_failure(1), True),
        (signal_failure(15), False),
        (signal_failure(11), False),
        (signal_failure(6), False),
        (signal_failure(9, {"kills": 1, "kernel": True}), False),
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
def test_is_by_chance(failure: Failure, expected: bool) -> None:
    assert is_by_chance(failure) == expected


JOINING_PROGRAMS = """
import json, os, torch.distributed as dist
from paceline import train
from paceline.agent.ranks.process import watch_process_group

reading, writing = os.pipe()

def reported(join):
    join()
    os.write(writing, b"\\n")
    return [json.loads(line)["event"] for line in os.read(reading, 65536).splitlines() if line]

options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
watch_process_group(writing, any_world=True)
print(reported(lambda: dist.init_process_group("gloo", **options)))
os.environ["PACELINE_EVENT_FD"] = str(writing)
print(reported(lambda: train.join(quiet=True)))
"""


def test_rank_reports_that_it_joins_before_it_has_joined(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", JOINING_PROGRAMS]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.stdout.splitlines() == ["['joining', 'world joined']", "['joining', 'joined']"], (
        result.stderr
    )
