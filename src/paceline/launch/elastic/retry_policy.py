"""Decides what is tried again: an attempt, a start, a lost host, a rank. Pure.

One object counts for a whole job. A script's ranks all start again, a session recovers in place
after an exception of its own: both use up ``--max-restarts``. What the job cannot help does not:
a lost node if the job may shrink, and, a few times, any loss before the first step. Before its
first step a training has learnt nothing: a loss then costs only a start. A failure that repeats
itself is the program's own, and ends the job.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from dataclasses import dataclass, replace

from paceline.launch.failure_analysis import for_its_memory
from paceline.launch.planning.request import trains
from paceline.spec.events import Event
from paceline.spec.failure import Failure
from paceline.spec.formatting import pluralize, span
from paceline.spec.job import Job

MAX_LINE_BYTES = 300
_KINDS_OF_HOSTS = ("lost", "agent", "lease", "forkserver", "launcher")
# A program that crashes would do so again.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
            signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ)  # fmt: skip
MAX_HOST_LOSSES = 3  # of one host within the window, after which it is left out
MAX_STARTS = 3  # in a row without a step, after which a loss ends the job
NEWCOMER_DELAYS_S = (0.0, 1.0, 5.0)  # before each start of a newcomer; then it is left out
MAX_STRIKES = 3  # signals that end the same rank without a step in between
# Two attempts came equally far if the longer took at most so many times the shorter's time plus a
# constant: a start never takes equally long.
SAME_DURATION_RATIO = 1.25
SAME_DURATION_SLACK_S = 2.0

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals by which the kernel ends a program for what it did itself."""

_RATES_AND_TIMES = re.compile(r"\d{1,20}(?:[.:,]\d{1,20}){1,9}(?:e[+-]?\d{1,3})?")
_COUNTS = re.compile(r"\d{1,20}")
_PLACE = re.compile(r'^\s{0,40}File "([^"\n]{1,4096})", line (\d{1,9})', re.MULTILINE)


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the job goes on.

    Attributes:
        again: Whether it does.
        why: Why not, for people; empty if no restart was allowed in the first place.
        number: How many failures count by now.
        limit: How many may.
        before_first_step: Whether this is another start of an attempt that came to no step.
        notes: What the user is told.
    """

    again: bool
    why: str = ""
    number: int = 0
    limit: int = 0
    before_first_step: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the hosts show about a failed attempt.

    Attributes:
        lost_hosts: Hosts were lost or asked to end, which is why it failed, and it may shrink.
        full_disk: Why no checkpoint or log can be written; empty if they can.
        by_chance: The failure is nobody's fault.
    """

    lost_hosts: bool = False
    full_disk: str = ""
    by_chance: bool = False


class RetryPolicy:
    """Decides what is tried again and counts the retries that were used.

    Args:
        max_restarts: How many failures within the window another start may follow.
        window_s: Seconds after which a failure no longer counts; 0 for never.
        retries_start: Whether a loss before the first step is followed by another start.

    Attributes:
        counted: How many restarts followed a failure that counts.
    """

    def __init__(self, max_restarts: int = 0, window_s: float = 0.0,
                 retries_start: bool = True) -> None:  # fmt: skip
        self.counted = 0
        self.retries_start = retries_start
        self._max_restarts, self._window_s = max_restarts, window_s
        self._failed_at: deque[float] = deque()
        self._losses: dict[str, deque[float]] = {}
        self._starts_without_step = 0
        self._last: tuple[tuple[str, ...], int | None, float, str] | None = None
        self._last_at = 0.0
        self._crash: tuple[Failure, int, int] | None = None  # the last, its step and generation

    # --- the whole job -----------------------------------------------------------------------

    def reconnects(self, number: int) -> bool:
        """Whether to connect all hosts again after that many losses before there is a plan."""
        return self.retries_start and number < MAX_STARTS

    def after_attempt(self, failure: Failure, diagnosis: Diagnosis,
                      startup: StartupTracker | None, now: float,
                      ran_s: float) -> Verdict:  # fmt: skip
        """Counts a failed attempt and says whether the job starts again.

        Args:
            failure: The first of the attempt.
            diagnosis: What the hosts show.
            startup: What the attempt did before its first step; ``None`` if it recovered before.
            now: Seconds of any monotonic clock.
            ran_s: How long the ranks ran.
        """
        if startup is None or startup.is_over:
            self._starts_without_step = 0
        if failure.kind == "stranger":
            note = "the job is not started again while somebody interferes with it"
            return Verdict(False, notes=(note,))
        if diagnosis.lost_hosts:
            return Verdict(True)
        if diagnosis.full_disk:
            note = f"{diagnosis.full_disk}: the job is not started again"
            return Verdict(False, notes=(note,))
        notes: tuple[str, ...] = ()
        if diagnosis.by_chance:
            self._starts_without_step += 1
            if self._starts_without_step < MAX_STARTS:
                number = self._starts_without_step
                return Verdict(True, "", number, MAX_STARTS - 1, before_first_step=True)
            notes = (f"not begun again: {MAX_STARTS} starts in a row came to no step",)
        last_line = "" if startup is None else startup.last_line
        verdict = self.after_failure(failure, now, ran_s=ran_s, last_line=last_line)
        if verdict.why:
            notes += (f"not started again: {verdict.why}",)
        return replace(verdict, limit=self._max_restarts, notes=notes)

    def after_failure(self, failure: Failure, now: float, *, step: int | None = None,
                      ran_s: float = 0.0, last_line: str = "") -> Verdict:  # fmt: skip
        """Counts a failure of the program itself and returns whether the job continues.

        Args:
            failure: The first of its attempt.
            now: Seconds of any monotonic clock.
            step: Of the session in which it happened; ``None`` for a script, whose steps nobody
                knows.
            ran_s: How long the ranks ran: a script that comes equally far each time shows it.
            last_line: The last line that a rank wrote. Different numbers in it, such as a step's,
                show that a script came to another place.
        """
        mark = signature(failure)
        last, self._last = self._last, (mark, step, ran_s, last_line)
        since_last_s, self._last_at = now - self._last_at, now
        _forget(self._failed_at, now, self._window_s)
        if not self._max_restarts:
            return Verdict(False)
        if mark and last is not None and last[0] == mark:
            if step is not None and step == last[1]:
                return Verdict(
                    False,
                    f"the same failure as before, at the same step ({step}), on the same data:"
                    " it is the program's own",
                    len(self._failed_at),
                )
            # A rare failure may follow the clock: a login that expires, a job of the system's.
            is_recent = not self._window_s or since_last_s <= self._window_s
            moved = _counts_differ(last_line, last[3])
            if step is None and is_recent and _same_duration(ran_s, last[2]) and not moved:
                where = f" at {mark[-1]}" if mark[-1] else ""
                return Verdict(
                    False,
                    f"the same failure as before{where}, and after as long a time:"
                    " it is the program's own",
                    len(self._failed_at),
                )
        if len(self._failed_at) >= self._max_restarts:
            return Verdict(False, self._used_up(), len(self._failed_at))
        self._failed_at.append(now)
        self.counted += 1
        return Verdict(True, number=len(self._failed_at))

    def _used_up(self) -> str:
        times = pluralize(self._max_restarts, "restart")
        if not self._window_s:
            return f"{times} used up (--max-restarts {self._max_restarts})"
        return f"{times} within {span(self._window_s)} (--max-restarts {self._max_restarts})"

    def redials(self, host: str, now: float) -> bool:
        """Counts the loss of a host; returns whether to reconnect to it."""
        losses = self._losses.setdefault(host, deque())
        _forget(losses, now, self._window_s)
        losses.append(now)
        return len(losses) < MAX_HOST_LOSSES

    # --- one rank of a session ---------------------------------------------------------------

    def begin_attempt(self) -> None:
        """Forgets the crashes of the last attempt, because all ranks start again."""
        self._crash = None

    @staticmethod
    def newcomer_delay_s(failed_starts: int) -> float | None:
        """Returns the seconds before a new rank is started again; ``None`` to give up."""
        return NEWCOMER_DELAYS_S[failed_starts] if failed_starts < len(NEWCOMER_DELAYS_S) else None

    @staticmethod
    def replaces_killed(strikes: int) -> bool:
        """Whether to replace a rank that signals have ended that often without a step between."""
        return strikes < MAX_STRIKES

    def repeated_crash(self, failure: Failure, step: int, generation: int) -> Failure | None:
        """Records a crash; returns an earlier one of another group at the same step, if any."""
        mark = signature(failure)
        if not mark:
            return None
        last, self._crash = self._crash, (failure, step, generation)
        if last is None or (last[1], signature(last[0])) != (step, mark):
            return None
        return last[0] if last[2] != generation else None


def _same_duration(ran_s: float, last_s: float) -> bool:
    """Whether two attempts of a script ran about equally long.

    One that begins at a checkpoint takes less time to the same place than the first, but as much
    as the next. What chance does, such as a disk that fails now and then, takes any time.
    """
    shorter, longer = sorted((ran_s, last_s))
    return longer <= shorter * SAME_DURATION_RATIO + SAME_DURATION_SLACK_S


def _counts_differ(line: str, last_line: str) -> bool:
    """Whether two lines hold different whole numbers, rates and times of day left out."""
    counts, last_counts = (
        _COUNTS.findall(_RATES_AND_TIMES.sub("", text)) for text in (line, last_line)
    )
    return bool(counts and last_counts) and counts != last_counts


def _forget(times: deque[float], now: float, window_s: float) -> None:
    while window_s and times and now - times[0] > window_s:
        times.popleft()


def signature(failure: Failure) -> tuple[str, ...]:
    """Returns what is equal when a program fails in the same way; empty for chance failures.

    The exception, its message and its line; or the signal, if the program's own instructions
    caused it. Other signals, a lost node, or a wait for a rank that is gone say nothing about the
    program.
    """
    if failure.kind == "signal" and failure.signal in CRASHES:
        return failure.headline, ""
    if failure.kind != "exception" or failure.is_secondary:
        return ()
    places = _PLACE.findall(failure.traceback)
    place = f"{places[-1][0].rsplit('/', 1)[-1]}, line {places[-1][1]}" if places else ""
    return failure.headline, place
