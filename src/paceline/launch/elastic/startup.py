"""Tracks whether the ranks of an attempt have work to lose, and which failures are chance. Pure.

Before its first step a training has learnt nothing. A loss then costs only a start, so
:mod:`paceline.launch.elastic.retry_policy` has the job begin again by itself.
"""

from __future__ import annotations

import signal

from paceline.launch.failure_analysis import for_its_memory
from paceline.launch.planning.request import trains
from paceline.spec.events import Event
from paceline.spec.failure import Failure
from paceline.spec.job import Job

MAX_LINE_BYTES = 300
_KINDS_OF_HOSTS = ("lost", "agent", "lease", "forkserver", "launcher")
# A program that crashes would do so again.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
            signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ)  # fmt: skip


def is_by_chance(failure: Failure) -> bool:
    """Whether a failure is chance: of a host, an agent, a fork server, or a kill from outside.

    Or of this launcher, if it was stopped or asleep for so long that its nodes left. What the
    program does itself (an exception, an exit, a crash, its memory) and a SIGTERM that somebody
    sent are no chance.
    """
    if failure.kind in _KINDS_OF_HOSTS:
        return True
    killed = failure.kind == "signal" and failure.signal not in _CRASHES
    return killed and not failure.was_requested and not for_its_memory(failure)


class StartupTracker:
    """Follows the events of one attempt until its first step.

    Args:
        job: The job.
        world_size: How many ranks there are.

    Attributes:
        is_session: Whether the ranks are a session of ``paceline.train``.
    """

    def __init__(self, job: Job, world_size: int) -> None:
        self.is_session = trains(job)
        is_python = job.entry.kind in ("script", "module") and job.needs_torch
        self._ranks_meet = is_python and world_size > 1 and not job.opens_store
        self._started = False
        self._has_output = False  # for people, or for its other ranks
        self._first_step = 0  # the step of the checkpoint that it resumes
        self._step = 0  # the latest that was reported
        self._last_lines: dict[int, str] = {}  # by rank, the end of its last line of output

    def on_event(self, event: Event) -> None:
        """Handles an event of an agent or a rank."""
        if event.kind == "rank started":
            self._started = True
        elif event.kind in ("joined", "recoverable"):
            self.is_session = True
        elif event.kind in ("output", "world joined"):
            self._has_output = True
            if event["stream"] == "out" and (line := event.blob.rstrip().rpartition(b"\n")[2]):
                text = line[-MAX_LINE_BYTES:].decode(errors="replace")
                self._last_lines[event.rank or 0] = text
        elif event.kind == "resumed":
            self._first_step = max(self._first_step, event["step"] or 0)
        elif event.kind in ("heartbeat", "progress", "metrics"):
            self._step = max(self._step, event["step"] or 0)

    @property
    def last_line(self) -> str:
        """The last line that the lowest rank with output has written."""
        return self._last_lines[min(self._last_lines)] if self._last_lines else ""

    @property
    def is_over(self) -> bool:
        """Whether a start from the beginning would lose, or repeat, something.

        A session shows it by its steps. Nobody sees the first step of any other script: before
        its ranks have met it cannot have made one with others, and before it has written anything
        it has done nothing that anybody saw. A script that needs no others may have done anything.
        """
        if self.is_session:
            return self._step > self._first_step
        return self._started and (self._has_output or not self._ranks_meet)
