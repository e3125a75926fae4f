"""What a rank is doing: its process's state, and the Python lines that it stands in.

A rank dumps its stack when it gets :data:`SIGNAL`, from C and without the interpreter's lock: also
one that waits in a library. It is only sent to a process that catches it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import time
from typing import List, Tuple

from ..supervision import processes
from . import flight_recorder

SIGNAL = signal.SIGRTMAX - 3  # nobody's, and no system call fails for it
MOST_LINES = 60
DISTURBED_S = 1.2  # for which an answer may take a process's time
LONGEST_S = 5.0  # the same, of one that is late
DUMP_CPU_S = 0.01  # what a stack may cost a process
QUIET_S = 0.8  # in which no more of a stack comes: then that was all
_BEGINS, _ENDS = "Stack (most recent call first)", "in _run_module_as_main"
# that of the shipped archive
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def register(fd: int) -> None:
    """Makes this process write its main thread's stack to ``fd`` when it gets the signal.

    And those of all threads when it crashes.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.register(SIGNAL, file=fd, all_threads=False, chain=False)
        if not faulthandler.is_enabled():  # by the user, who wants to read it
            faulthandler.enable(file=fd, all_threads=True)


def ask(process: processes.Process) -> Tuple[str, bool]:
    """Asks for the stack if it can be had.

    Returns the process's state, as in ``/proc/PID/stat``, and whether a stack will come.
    """
    stat = processes.read_stat(process.pid)
    if stat is None:
        return "", False
    comes = (
        stat.state != "T"
        and processes.catches(process.pid, SIGNAL)
        and processes.send(process, SIGNAL)
    )
    return stat.state, comes


class StackDump:
    """What was seen of one rank: its state, its stack, those of its children, its collectives."""

    def __init__(self) -> None:
        self.asked = False
        self.state = ""
        self.stack: List[str] = []
        self.calls: List[str] = []
        self._crashed = False
        self._asked_at = -math.inf
        self._line_at = 0.0
        self._due = 0  # stacks that are still to come
        self._calls_due = 0
        self._tells_calls = True  # until it is known better
        self._last_word = False  # it has told its calls by itself, as one that has failed does
        self._cpu_s = 0.0  # of the process, for our sake
        self._taken = self.stack  # where lines that come now belong

    def ask(self, process: processes.Process, closely: bool = False) -> None:
        self.asked, self.stack = True, []
        self._taken = self.stack
        self._asked_at = time.monotonic()
        self.state = self._ask(process)
        self._cpu_s += DUMP_CPU_S
        if closely:
            self.ask_calls(process)

    def ask_calls(self, process: processes.Process) -> None:
        """The rank's collectives, which come a moment later; of one that is stopped none come."""
        self._asked_at = time.monotonic()
        self._tells_calls = self._tells_calls and not self._calls_due
        if not self._last_word:
            self.calls = []
            if flight_recorder.ask(process):
                self._calls_due += 1

    def ask_child(self, process: processes.Process) -> List[str]:
        """The lines of a child of the rank, which come a moment later through the same pipe."""
        lines: List[str] = []
        self._taken = lines
        self._ask(process)
        return lines

    def _ask(self, process: processes.Process) -> str:
        self._due += 1  # before it is asked: another thread reads what comes
        self._line_at = time.monotonic()
        state, comes = ask(process)
        if not comes:
            self._due -= 1
        return state

    def whole(self, now: float) -> bool:
        """Whether the stacks that were asked for have come, to their ends."""
        if self._due and self._taken and now - self._line_at > QUIET_S:
            self._due = 0  # one without the usual end
        return not self._due

    def complete(self, now: float) -> bool:
        """Whether all that was asked for has come, of a rank that has ever answered in time."""
        return self.whole(now) and not (self._calls_due and self._tells_calls)

    def disturbed(self, now: float) -> bool:
        """Whether the process may still be at work for our sake."""
        late = bool(self._due or (self._calls_due and self._tells_calls))
        return now < self._asked_at + (LONGEST_S if late else DISTURBED_S)

    def take_cpu(self) -> float:
        """Seconds of CPU that its answers have cost the process since this was asked last."""
        cpu_s, self._cpu_s = self._cpu_s, 0.0
        return cpu_s

    def take(self, line: bytes) -> None:
        """One line of the dump, unless it is of our own code; others may write there, too."""
        text = line.decode(errors="replace").strip()
        if text.startswith("Fatal Python error"):
            self.asked = self._crashed = True
        elif self._crashed and " (most recent call first)" in text:
            self._taken = self.stack = []  # of threads the main one comes last
        elif text.startswith(_BEGINS):
            del self._taken[:]  # of a stack that came too late
        ours = OWN_FOLDER in text or '"<frozen runpy>"' in text
        if self.asked and text.startswith("File ") and not ours and len(self._taken) < MOST_LINES:
            self._taken.append(text)
        self._line_at = time.monotonic()
        if text.endswith(_ENDS) or text == "...":
            self._due = max(self._due - 1, 0)

    def take_calls(self, calls: object, cpu_s: object = 0.0) -> None:
        """What the rank's flight recorder says: lines of text; and what saying it has cost."""
        if isinstance(calls, list):
            self.calls = [str(call)[:200] for call in calls[-flight_recorder.MOST_CALLS :]]
            self._last_word = self._last_word or not self._calls_due
            self._tells_calls, self._calls_due = True, max(self._calls_due - 1, 0)
        if isinstance(cpu_s, (int, float)):
            self._cpu_s += max(float(cpu_s), 0.0)
