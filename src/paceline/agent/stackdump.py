"""What a rank is doing: its process's state, and the Python lines that it stands in.

A rank dumps its stack when it gets :data:`SIGNAL`, from C and without the interpreter's lock: also
one that waits in a library. It is only sent to a process that catches it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from typing import List

from . import procs

SIGNAL = signal.SIGRTMAX - 3  # nobody's, and no system call fails for it
MOST_LINES = 60
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def register(fd: int) -> None:
    """Makes this process write its main thread's stack to ``fd`` when it gets the signal."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.register(SIGNAL, file=fd, all_threads=False, chain=False)


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
    """What was seen of one rank: its state and its stack."""

    def __init__(self) -> None:
        self.asked = False
        self.state = ""
        self.stack: List[str] = []

    def ask(self, process: procs.Process) -> None:
        self.asked, self.stack = True, []
        self.state = ask(process)

    def take(self, line: bytes) -> None:
        """One line of the dump, unless it is of our own code; others may write there, too."""
        text = line.decode(errors="replace").strip()
        ours = OWN_FOLDER in text or '"<frozen runpy>"' in text
        if self.asked and text.startswith("File ") and not ours and len(self.stack) < MOST_LINES:
            self.stack.append(text)
