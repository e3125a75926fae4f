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

from paceline.launch.failure_analysis import is_out_of_memory
from paceline.spec.events import Event
from paceline.spec.failure import Failure
from paceline.spec.formatting import pluralize, span
from paceline.spec.job import Job

MAX_LINE_BYTES = 300
_KINDS_OF_HOSTS = ("lost", "agent", "lease", "forkserver", "launcher")
MAX_HOST_LOSSES = 3  # of one host within the window, after which it is left out
RECIPES = "paceline.recipes."  # begins the names of their modules
MAX_STARTS = 3  # in a row without a step, after which a loss ends the job
NEWCOMER_DELAYS_S = (0.0, 1.0, 5.0)  # before each start of a newcomer; then it is left out
MAX_STRIKES = 3  # signals that end the same rank without a step in between
# Two attempts came equally far if the longer took at most so many times the shorter's time plus a
# constant: a start never takes equally long.
DURATION_TOLERANCE = 1.25
DURATION_SLACK_S = 2.0

# Signals by which the kernel ends a program because of its own instructions
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_REPEATABLE = (*CRASHES, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU,
               signal.SIGXFSZ)  # fmt: skip

_RATES_AND_TIMES = re.compile(r"\d{1,20}(?:[.:,]\d{1,20}){1,9}(?:e[+-]?\d{1,3})?")
_INTEGERS = re.compile(r"\d{1,20}")
_PLACE = re.compile(r'^\s{0,40}File "([^"\n]{1,4096})", line (\d{1,9})', re.MULTILINE)


def is_by_chance(failure: Failure) -> bool:
    """Whether a failure is chance: of a host, an agent, a fork server, or a kill from outside.

    Or of this launcher, if it was stopped or asleep for so long that its nodes left. What the
    program does itself (an exception, an exit, a crash, its memory) and a SIGTERM that somebody
    sent are no chance.
    """
    if failure.kind in _KINDS_OF_HOSTS:
        return True
    killed = failure.kind == "signal" and failure.signal not in _REPEATABLE
    return killed and not failure.was_terminated and not is_out_of_memory(failure)


class StartupTracker:
    """Follows the events of one attempt until its first step.

    Attributes:
        is_session: Whether the ranks are a session of ``paceline.train``.
    """

    def __init__(self, job: Job) -> None:
        self.is_session = job.trains
        self._is_recipe = job.entry.kind == "module" and job.entry.target.startswith(RECIPES)
        self._started: set[int | None] = set()  # ranks whose programs run
        self._joining: set[int | None] = set()  # ranks that joined a group, or wait for the others
        self._has_output = False  # for people, or for its other ranks
        self._first_step = 0  # the step of the checkpoint that it resumes
        self._step = 0  # the latest that was reported
        self._output_lines: dict[int, str] = {}  # by rank, the end of its last line of output

    def on_event(self, event: Event) -> None:
        """Handles an event of an agent or a rank."""
        if event.kind == "rank started":
            self._started.add(event.rank)
        elif event.kind == "joining":
            self._joining.add(event.rank)
        elif event.kind in ("joined", "recoverable"):
            self.is_session = True
            self._joining.add(event.rank)
        elif event.kind in ("output", "world joined"):
            self._has_output = True
            if event["stream"] == "out" and (line := event.blob.rstrip().rpartition(b"\n")[2]):
                text = line[-MAX_LINE_BYTES:].decode(errors="replace")
                self._output_lines[event.rank or 0] = text
        elif event.kind == "resumed":
            self._first_step = max(self._first_step, event["step"] or 0)
        elif event.kind in ("heartbeat", "progress", "metrics"):
            self._step = max(self._step, event["step"] or 0)

    @property
    def output_line(self) -> str:
        """The last line that the lowest rank with output has written."""
        return self._output_lines[min(self._output_lines)] if self._output_lines else ""

    @property
    def has_work_to_lose(self) -> bool:
        """Whether a start from the beginning would lose, or repeat, something.

        A program that does not join a process group may have done anything, whatever it imports.
        One that joins has made no step before: a session reports its steps, and another program has
        made none while its ranks are not connected and it has written nothing. A recipe only reads
        its data before it joins.
        """
        if self._started - self._joining and not self._is_recipe:
            return True
        return self._step > self._first_step if self.is_session else self._has_output


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the job goes on.

    Attributes:
        retries: Whether it does.
        reason: Why not, as text; empty if no restart was allowed in the first place.
        number: How many failures have counted so far.
        limit: How many are allowed.
        is_start: Whether this repeats a start that came to no step.
    """

    retries: bool
    reason: str = ""
    number: int = 0
    limit: int = 0
    is_start: bool = False
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


@dataclass(frozen=True, slots=True)
class _Occurrence:
    """A failure that was judged: see :meth:`RetryPolicy.judge_failure` and :func:`signature`."""

    signature: tuple[str, ...]
    step: int | None
    timestamp: float
    ran_s: float
    output_line: str


class RetryPolicy:
    """Decides what is tried again and counts the retries that were used.

    Args:
        max_restarts: How many failures within the window another start may follow.
        window_s: Seconds after which a failure no longer counts; 0 for never.
        retries_start: Whether a loss before the first step is followed by another start.

    Attributes:
        num_restarts: How many restarts followed a failure that counts.
    """

    def __init__(self, max_restarts: int = 0, window_s: float = 0.0,
                 retries_start: bool = True) -> None:  # fmt: skip
        self.num_restarts = 0
        self.retries_start = retries_start
        self._max_restarts, self._window_s = max_restarts, window_s
        self._failed_at: deque[float] = deque()
        self._losses: dict[str, deque[float]] = {}
        self._num_futile_starts = 0
        self._previous: _Occurrence | None = None
        self._crash: tuple[Failure, int, int] | None = None  # the last, its step and generation

    # --- the whole job -----------------------------------------------------------------------

    def reconnects(self, number: int) -> bool:
        """Whether to connect all hosts again after that many losses before there is a plan."""
        return self.retries_start and number < MAX_STARTS

    def judge_attempt(self, failure: Failure, diagnosis: Diagnosis,
                      startup: StartupTracker | None, timestamp: float,
                      ran_s: float) -> Verdict:  # fmt: skip
        """Counts a failed attempt and says whether the job starts again.

        ``timestamp`` is of any monotonic clock; ``startup`` is ``None`` if ranks have recovered.
        """
        if startup is None or startup.has_work_to_lose:
            self._num_futile_starts = 0
        if failure.kind == "stranger":
            note = "the job is not started again while somebody interferes with it"
            return Verdict(False, notes=(note,))
        if failure.kind == "replicas":
            note = "the job is not started again: the ranks would load the same models"
            return Verdict(False, notes=(note,))
        if diagnosis.lost_hosts:
            return Verdict(True)
        if diagnosis.full_disk:
            note = f"{diagnosis.full_disk}: the job is not started again"
            return Verdict(False, notes=(note,))
        notes: tuple[str, ...] = ()
        if diagnosis.by_chance:
            self._num_futile_starts += 1
            if self._num_futile_starts < MAX_STARTS:
                number = self._num_futile_starts
                return Verdict(True, "", number, MAX_STARTS - 1, is_start=True)
            notes = (f"not started again: {MAX_STARTS} starts in a row reached no step",)
        output_line = "" if startup is None else startup.output_line
        verdict = self.judge_failure(failure, timestamp, ran_s=ran_s, output_line=output_line)
        if verdict.reason:
            notes += (f"not started again: {verdict.reason}",)
        return replace(verdict, limit=self._max_restarts, notes=notes)

    def judge_failure(self, failure: Failure, timestamp: float, *, step: int | None = None,
                      ran_s: float = 0.0, output_line: str = "") -> Verdict:  # fmt: skip
        """Counts a failure of the program itself and returns whether the job continues.

        Args:
            timestamp: Seconds of any monotonic clock.
            step: The step of the session; ``None`` for a script, whose steps are unknown.
            ran_s: How long the ranks ran; a script that comes equally far takes equally long.
            output_line: The last line that a rank wrote. Different numbers in it, such as a step's,
                show that a script came to another place.
        """
        current = _Occurrence(signature(failure), step, timestamp, ran_s, output_line)
        previous, self._previous = self._previous, current
        _forget(self._failed_at, timestamp, self._window_s)
        if not self._max_restarts:
            return Verdict(False)
        if previous is not None and (repetition := self._repetition(previous, current)):
            reason = f"the same failure as before{repetition}: it is the program's own"
            return Verdict(False, reason, len(self._failed_at))
        if len(self._failed_at) >= self._max_restarts:
            return Verdict(False, self._used_up(), len(self._failed_at))
        self._failed_at.append(timestamp)
        self.num_restarts += 1
        return Verdict(True, number=len(self._failed_at))

    def _repetition(self, previous: _Occurrence, current: _Occurrence) -> str:
        """Describes how a failure repeats the previous one; empty if it does not."""
        if not current.signature or current.signature != previous.signature:
            return ""
        if current.step is not None:
            is_same_step = current.step == previous.step
            return f", at the same step ({current.step}), on the same data" if is_same_step else ""
        # A rare failure may follow the clock: a login that expires, a job of the system's.
        interval_s = current.timestamp - previous.timestamp
        is_recent = not self._window_s or interval_s <= self._window_s
        has_moved = _integers_differ(current.output_line, previous.output_line)
        if has_moved or not is_recent or not _is_similar_duration(current.ran_s, previous.ran_s):
            return ""
        place = f" at {current.signature[-1]}" if current.signature[-1] else ""
        return f"{place}, and after as long a time"

    def _used_up(self) -> str:
        times = pluralize(self._max_restarts, "restart")
        if not self._window_s:
            return f"{times} used up (--max-restarts {self._max_restarts})"
        return f"{times} within {span(self._window_s)} (--max-restarts {self._max_restarts})"

    def redials(self, host: str, timestamp: float) -> bool:
        """Counts the loss of a host; returns whether to reconnect to it."""
        losses = self._losses.setdefault(host, deque())
        _forget(losses, timestamp, self._window_s)
        losses.append(timestamp)
        return len(losses) < MAX_HOST_LOSSES

    # --- one rank of a session ---------------------------------------------------------------

    def reset_crashes(self) -> None:
        """Forgets the crashes of the last attempt, because all ranks start again."""
        self._crash = None

    @staticmethod
    def newcomer_delay_s(failed_starts: int) -> float | None:
        """Returns the seconds before a new rank is started again; ``None`` to give up."""
        return NEWCOMER_DELAYS_S[failed_starts] if failed_starts < len(NEWCOMER_DELAYS_S) else None

    def repeated_crash(self, failure: Failure, step: int, generation: int) -> Failure | None:
        """Records a crash; returns an earlier one of another group at the same step, if any."""
        crash_signature = signature(failure)
        if not crash_signature:
            return None
        previous, self._crash = self._crash, (failure, step, generation)
        if previous is None or (previous[1], signature(previous[0])) != (step, crash_signature):
            return None
        return previous[0] if previous[2] != generation else None


def _is_similar_duration(ran_s: float, previous_s: float) -> bool:
    """Whether two attempts of a script ran about equally long.

    One that begins at a checkpoint takes less time to the same place than the first, but as much
    as the next. What chance does, such as a disk that fails now and then, takes any time.
    """
    min_s, max_s = sorted((ran_s, previous_s))
    return max_s <= min_s * DURATION_TOLERANCE + DURATION_SLACK_S


def _integers_differ(line: str, previous_line: str) -> bool:
    """Whether two lines hold different whole numbers, rates and times of day left out."""
    numbers = _INTEGERS.findall(_RATES_AND_TIMES.sub("", line))
    previous_numbers = _INTEGERS.findall(_RATES_AND_TIMES.sub("", previous_line))
    return bool(numbers and previous_numbers) and numbers != previous_numbers


def _forget(times: deque[float], timestamp: float, window_s: float) -> None:
    while window_s and times and timestamp - times[0] > window_s:
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
