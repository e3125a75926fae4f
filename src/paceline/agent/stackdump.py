"""What a rank is doing: its process's state, and the Python lines that it stands in.

A rank dumps its stack when it gets :data:`SIGNAL`, from C and without the interpreter's lock: also
one that waits in a library. It is only sent to a process that catches it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from typing import List

from . import collectives, procs

SIGNAL = signal.SIGRTMAX - 3  # nobody's, and no system call fails for it
MOST_LINES = 60
DISTURBED_S = 1.2  # for which an answer may take a process's time
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def register(fd: int) -> None:
    """Makes this process write its main thread's stack to ``fd`` when it gets the signal.

    And those of all threads when it crashes.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.register(SIGNAL, file=fd, all_threads=False, chain=False)
        if not faulthandler.is_enabled():  # by the user, who wants to read it
            faulthandler.enable(file=fd, all_threads=True)


def ask(process: procs.Process) -> str:
    """Asks for the stack if it can be had; the process's state, as in ``/proc/PID/stat``."""
    stat = procs.read_stat(process.pid)
    if stat is None:
        return ""
    if stat.state != "T" and catches(process.pid):
        procs.send(process, SIGNAL)
    return stat.state


def catches(pid: int) -> bool:
    """Whether the process has a handler for the signal: without one it would die of it."""
    try:
        with open("/proc/%d/status" % pid) as file:
            masks = [line.split()[1] for line in file if line.startswith("SigCgt:")]
    except (OSError, IndexError):
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (SIGNAL - 1) & 1)


class StackDump:
    """What was seen of one rank: its state, its stack, those of its children, its collectives."""

    def __init__(self) -> None:
        self.asked = False
        self.state = ""
        self.stack: List[str] = []
        self.calls: List[str] = []
        self._crashed = False
        self.disturbed_until = 0.0  # until then it works for our sake
        self._taken = self.stack  # where lines that come now belong

    def ask(self, process: procs.Process, closely: bool = False) -> None:
        self.asked, self.stack = True, []
        self._taken = self.stack
        self.disturbed_until = time.monotonic() + DISTURBED_S
        self.state = ask(process)
        if closely and self.state != "T":
            self.calls = []
            collectives.ask(process)

    def ask_child(self, process: procs.Process) -> List[str]:
        """The lines of a child of the rank, which come a moment later through the same pipe."""
        lines = self._taken = []
        ask(process)
        return lines

    def take(self, line: bytes) -> None:
        """One line of the dump, unless it is of our own code; others may write there, too."""
        text = line.decode(errors="replace").strip()
        if text.startswith("Fatal Python error"):
            self.asked = self._crashed = True
        elif self._crashed and " (most recent call first)" in text:
            self._taken = self.stack = []  # of threads the main one comes last
        ours = OWN_FOLDER in text or '"<frozen runpy>"' in text
        if self.asked and text.startswith("File ") and not ours and len(self._taken) < MOST_LINES:
            self._taken.append(text)

    def take_calls(self, calls: object) -> None:
        """What the rank's flight recorder says: lines of text."""
        if isinstance(calls, list):
            self.calls = [str(call)[:200] for call in calls[-collectives.MOST_CALLS :]]
