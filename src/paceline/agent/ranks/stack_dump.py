"""Finds out what a rank is doing: the state of its process and its Python stack.

A rank dumps its stack on :data:`STACK_SIGNAL`, from C and without the interpreter's lock, so also
while it waits in a library. It is only sent to a process that catches it.
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

STACK_SIGNAL = signal.SIGRTMAX - 3  # nobody's, and no system call fails for it
MAX_LINES = 60
ANSWER_S = 1.2  # for which an answer may take a process's time
MAX_ANSWER_S = 5.0  # the same, of one that is late
DUMP_CPU_S = 0.01  # what a stack may cost a process
SILENCE_S = 0.8  # without a line, after which a stack counts as complete
_FIRST_LINE = "Stack (most recent call first)"
# of ranks, of processes that they spawn
_FINAL_LINES = ("in _run_module_as_main", '"<string>", line 1 in <module>')
# folder or archive of the agent's code
CODE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def register(fd: int) -> None:
    """Makes this process write its main thread's stack to ``fd`` when it gets the signal.

    If it crashes, it writes the stacks of all threads.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=False)
        if not faulthandler.is_enabled():  # the user may have enabled it for another file
            faulthandler.enable(file=fd, all_threads=True)


def request_stack(process: processes.Process) -> Tuple[str, bool]:
    """Asks for the stack if it can be had.

    Returns the process's state, as in ``/proc/PID/stat``, and whether a stack will come.
    """
    stat = processes.read_stat(process.pid)
    if stat is None:
        return "", False
    can_answer = stat.state != "T" and processes.has_handler(process.pid, STACK_SIGNAL)
    return stat.state, can_answer and processes.send(process, STACK_SIGNAL)


class StackDump:
    """Collects the state, the stacks and the collectives of one rank."""

    def __init__(self) -> None:
        self.is_requested = False
        self.state = ""
        self.stack: List[str] = []
        self.calls: List[str] = []
        self.unfinished = ""  # collective that the GPU has not completed
        self._crashed = False
        self._requested_at = -math.inf
        self._line_at = 0.0
        self._num_pending_stacks = 0  # stacks that are still to come
        self._num_pending_calls = 0
        self._answers_calls = True  # until it is known better
        self._has_final_calls = False  # a failed rank reports its collectives by itself
        self._cpu_s = 0.0  # CPU time that requests have cost the process
        self._current = self.stack  # list for the next lines

    def request(self, process: processes.Process, collectives: bool = False) -> None:
        """Asks the rank for its stack, and also for its collectives if wanted."""
        self.is_requested, self.stack = True, []
        self._current = self.stack
        self._requested_at = time.monotonic()
        self.state = self._request(process)
        self._cpu_s += DUMP_CPU_S
        if collectives:
            self.request_collectives(process)

    def request_collectives(self, process: processes.Process) -> None:
        """Asks the rank for its collectives; a stopped rank does not answer."""
        self._requested_at = time.monotonic()
        self._answers_calls = self._answers_calls and not self._num_pending_calls
        if not self._has_final_calls:
            self.calls, self.unfinished = [], ""
            if flight_recorder.request(process):
                self._num_pending_calls += 1

    def request_child(self, process: processes.Process) -> List[str]:
        """Asks a child of the rank for its stack; returns the list that will get its lines."""
        lines: List[str] = []
        self._current = lines
        self._request(process)
        return lines

    def _request(self, process: processes.Process) -> str:
        self._num_pending_stacks += 1  # before the request: another thread reads the answer
        self._line_at = time.monotonic()
        state, will_arrive = request_stack(process)
        if not will_arrive:
            self._num_pending_stacks -= 1
        return state

    def has_stacks(self, now_s: float) -> bool:
        """Whether all requested stacks have arrived completely."""
        if self._num_pending_stacks and self._current and now_s - self._line_at > SILENCE_S:
            self._num_pending_stacks = 0  # one without the usual end
        return not self._num_pending_stacks

    def is_complete(self, now_s: float) -> bool:
        """Whether all answers have arrived, without collectives of a rank that never sends them."""
        return self.has_stacks(now_s) and not (self._num_pending_calls and self._answers_calls)

    def is_perturbed(self, now_s: float) -> bool:
        """Whether the process may still use CPU time for a request."""
        is_pending = self._num_pending_stacks or (self._num_pending_calls and self._answers_calls)
        return now_s < self._requested_at + (MAX_ANSWER_S if is_pending else ANSWER_S)

    def pop_cpu_s(self) -> float:
        """Returns the CPU seconds that requests have cost the process since the last call."""
        cpu_s, self._cpu_s = self._cpu_s, 0.0
        return cpu_s

    def add_line(self, line: bytes) -> None:
        """Adds a line of the dump; ignores the agent's own code and other text in the pipe."""
        text = line.decode(errors="replace").strip()
        if text.startswith("Fatal Python error"):
            self.is_requested = self._crashed = True
        elif self._crashed and " (most recent call first)" in text:
            self._current = self.stack = []  # of threads the main one comes last
        elif text.startswith(_FIRST_LINE):
            del self._current[:]  # of a stack that came too late
        is_agent_code = CODE_FOLDER in text or '"<frozen runpy>"' in text
        is_wanted = self.is_requested and len(self._current) < MAX_LINES
        if is_wanted and text.startswith("File ") and not is_agent_code:
            self._current.append(text)
        self._line_at = time.monotonic()
        if text.endswith(_FINAL_LINES) or text == "...":
            self._num_pending_stacks = max(self._num_pending_stacks - 1, 0)

    def set_calls(self, calls: object, cpu_s: object = 0.0, unfinished: object = "") -> None:
        """Sets the lines of the rank's flight recorder, and the CPU seconds that they cost."""
        if isinstance(calls, list):
            self.unfinished = str(unfinished)[:200] if isinstance(unfinished, str) else ""
            self.calls = [str(call)[:200] for call in calls[-flight_recorder.MAX_CALLS :]]
            self._has_final_calls = self._has_final_calls or not self._num_pending_calls
            self._answers_calls, self._num_pending_calls = True, max(self._num_pending_calls - 1, 0)
        if isinstance(cpu_s, (int, float)):
            self._cpu_s += max(float(cpu_s), 0.0)
