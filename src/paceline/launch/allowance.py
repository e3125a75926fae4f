"""Whether what failed may go on once more: counts failures, knows one that repeats. Pure.

One rule for both ways of going on: all ranks of a script start again, or a session recovers in
place after an exception of its own. What the job cannot help, such as a lost node, is not counted
where the job may shrink, nor, a few times, before the first step; a host that is lost again and
again is left out.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from dataclasses import dataclass

from paceline.spec.failure import Failure
from paceline.spec.helptext import counted

LOSSES = 3  # of one host within the window, after which it is left out
STARTS = 3  # that come to no step, after which a loss ends the job
AS_LONG = 1.25  # two attempts came as far where the longer took at most so many times the shorter's
AS_LONG_S = 2.0  # time, and a little more: a start is never as long as another

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals by which the kernel ends a program for what it did itself."""

_MEASURES = re.compile(r"\d{1,20}(?:[.:,]\d{1,20}){1,9}(?:e[+-]?\d{1,3})?")
_COUNTS = re.compile(r"\d{1,20}")
_PLACE = re.compile(r'^\s{0,40}File "([^"\n]{1,4096})", line (\d{1,9})', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the job goes on.

    Attributes:
        again: It does.
        why: Why not, for people; empty where nobody had allowed it in the first place.
        number: Of the failures that count by now.
    """

    again: bool
    why: str = ""
    number: int = 0


class Allowance:
    """What ``--max-restarts`` and ``--restart-window`` allow, and what was used of it.

    Args:
        most: Failures that may be followed by another start, within the window.
        window_s: Seconds after which a failure does not count any more; 0 for never.
    """

    def __init__(self, most: int, window_s: float) -> None:
        self.counted = 0  # in all
        self._most = most
        self._window_s = window_s
        self._times: deque[float] = deque()
        self._losses: dict[str, deque[float]] = {}
        self._vain = 0  # starts in a row that came to no step
        self._last: tuple[tuple[str, ...], int | None, float, str] | None = None
        self._last_at = 0.0

    def after(self, failure: Failure, now: float, *, step: int | None = None,
              ran_s: float = 0.0, told: str = "") -> Verdict:  # fmt: skip
        """Counts a failure and says whether the job goes on after it.

        Args:
            failure: The first of its attempt.
            now: Seconds of any clock that only moves on.
            step: Of the session in which it happened; ``None`` for a script, whose steps nobody
                knows.
            ran_s: How long the ranks had run; by this a script is told that comes as far each time.
            told: The last line that a rank had written: by the numbers in it, such as a step's, a
                script may be seen to have come to another place.
        """
        mark = signature(failure)
        last, self._last = self._last, (mark, step, ran_s, told)
        since_last, self._last_at = now - self._last_at, now
        _forget(self._times, now, self._window_s)
        if not self._most:
            return Verdict(False)
        if mark and last is not None and last[0] == mark:
            if step is not None and step == last[1]:
                return Verdict(
                    False,
                    f"the same failure as before, at the same step ({step}), on the same data:"
                    " it is the program's own",
                    len(self._times),
                )
            # What comes as seldom may come by the clock: a login that ends, a job of the system's.
            lately = not self._window_s or since_last <= self._window_s
            elsewhere = _other_place(told, last[3])
            if step is None and lately and _as_long(ran_s, last[2]) and not elsewhere:
                where = f" at {mark[-1]}" if mark[-1] else ""
                return Verdict(
                    False,
                    f"the same failure as before{where}, and after as long a time:"
                    " it is the program's own",
                    len(self._times),
                )
        if len(self._times) >= self._most:
            return Verdict(False, self._used_up(), len(self._times))
        self._times.append(now)
        self.counted += 1
        return Verdict(True, number=len(self._times))

    def _used_up(self) -> str:
        times = counted(self._most, "restart")
        if not self._window_s:
            return f"{times} used up (--max-restarts {self._most})"
        return f"{times} within {span(self._window_s)} (--max-restarts {self._most})"

    def begins_again(self) -> Verdict:
        """Counts a loss before the first step; whether the job begins again all the same."""
        self._vain += 1
        if self._vain < STARTS:
            return Verdict(True, number=self._vain)
        return Verdict(False, f"{STARTS} starts in a row came to no step", self._vain)

    def began(self) -> None:
        """An attempt has come as far as its first step."""
        self._vain = 0

    def lost(self, host: str, now: float) -> bool:
        """Counts the loss of a host; whether it is to be dialled again."""
        times = self._losses.setdefault(host, deque())
        _forget(times, now, self._window_s)
        times.append(now)
        return len(times) < LOSSES


def _as_long(ran_s: float, last_s: float) -> bool:
    """Whether two attempts of a script came as far, as their times tell.

    One that begins at a checkpoint takes less time to the same place than the first, but as much
    as the next. What chance does, such as a disk that fails now and then, takes any time.
    """
    shorter, longer = sorted((ran_s, last_s))
    return longer <= shorter * AS_LONG + AS_LONG_S


def _other_place(told: str, before: str) -> bool:
    """Whether two last lines count otherwise; a rate or a time of day counts nothing."""
    now, then = (_COUNTS.findall(_MEASURES.sub("", line)) for line in (told, before))
    return bool(now and then) and now != then


def _forget(times: deque[float], now: float, window_s: float) -> None:
    while window_s and times and now - times[0] > window_s:
        times.popleft()


def signature(failure: Failure) -> tuple[str, ...]:
    """What is the same when a program fails in the same way again; empty for what chance does.

    Its exception, its words and its line; or the signal, where the program's own instructions have
    brought it about. Other signals, a lost node, or a wait for somebody who has gone say nothing
    of the program.
    """
    if failure.kind == "signal" and failure.signal in CRASHES:
        return failure.headline, ""
    if failure.kind != "exception" or failure.echo:
        return ()
    places = _PLACE.findall(failure.traceback)
    place = f"{places[-1][0].rsplit('/', 1)[-1]}, line {places[-1][1]}" if places else ""
    return failure.headline, place


def span(seconds: float) -> str:
    """``10 minutes``, ``1 hour``, ``90 s``: a length of time in the largest unit that fits."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length and seconds % length == 0:
            return counted(int(seconds // length), unit)
    return f"{seconds:g} s"
