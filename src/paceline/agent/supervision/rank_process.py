"""One rank as the agent sees it: its process, its pipes, its activity, its end."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, Optional

from ..ranks import stack_dump
from . import gloo_threads, processes, stalls

Message = Dict[str, Any]
DRAIN_S = 1.0  # how long after a rank's end its pipes may stay open (grandchildren hold them)
MAX_LINE_BYTES = 1 << 20
MIN_CPU_SHARE = 0.02  # of a CPU: a rank that uses less is idle
MIN_TICKS = 4.0  # the counts of a process and of some of its threads may differ by so much
MAX_INTERVAL_S = 2.0  # over which CPU ticks are counted
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class RankProcess:
    """One rank: its pipes, its identity, its end."""

    def __init__(self, rank: int, local_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.process: Optional[processes.Process] = None
        self.status: Optional[int] = None
        self.ended_at = 0.0
        self.is_reported = False
        self.is_group_signaled = False  # its child processes were signalled, too
        self.fds: Dict[int, str] = {}  # read end -> "out" | "err" | "events"
        self.control_fd: Optional[int] = None  # write end of its control pipe
        self.unsent = bytearray()  # lines that the control pipe has not taken yet
        self.partial = b""  # an unfinished line of the events pipe
        self.event_bytes = 0  # read from the events pipe so far
        self.child_event_bytes = 0  # of these, written by the rank's children
        self.peak_bytes = 0  # of memory
        self.dump = stack_dump.StackDump()
        self.active_at = time.monotonic()  # when it last used a CPU or sent an event
        self.stall = stalls.StallDetector()
        self.is_replaceable = False  # the others continue if it is lost
        self._interval_start = (
            self.active_at
        )  # start of the interval over which CPU ticks are counted
        self._interval_cpu = 0
        self._gloo_loops = gloo_threads.LoopClock()
        self.inspected_gloo_loops = gloo_threads.LoopClock()  # sampled by inspections only
        self._loop_ticks = 0  # of gloo's loops at the interval's start
        self._diagnostic_ticks = 0.0  # spent on our own requests in the interval

    def sample(self, now_s: float) -> None:
        """Updates whether the process works, waits, or is stalled."""
        stat = None if self.process is None else processes.read_stat(self.process.pid)
        if stat is None or self.process is None or stat.start != self.process.start:
            return
        if self.dump.is_perturbed(now_s):  # its cost is known only afterwards
            self.stall.sample(now_s, stat, False)
            return
        self._diagnostic_ticks += self.dump.pop_cpu_s() * TICKS_PER_S
        loop_ticks = self._gloo_loops.ticks(self.process.pid, now_s)
        loop_delta, elapsed_s = loop_ticks - self._loop_ticks, now_s - self._interval_start
        work_ticks = stat.cpu - self._interval_cpu - self._diagnostic_ticks - loop_delta
        # One tick says nothing: a process that only waits comes to one every few seconds.
        min_ticks = MIN_TICKS if loop_delta else 1.0
        has_worked = work_ticks > max(min_ticks, MIN_CPU_SHARE * TICKS_PER_S * elapsed_s)
        if has_worked:
            self.active_at = now_s
        self.stall.sample(now_s, stat, has_worked)
        if has_worked or elapsed_s >= MAX_INTERVAL_S:
            self._interval_start, self._interval_cpu = now_s, stat.cpu
            self._loop_ticks, self._diagnostic_ticks = loop_ticks, 0.0

    def note_event(self, event: Message) -> None:
        """Reads whether the others can continue without it: then a stop is reported sooner."""
        is_recoverable = event.get("event") == "recoverable" and event.get("able") is True
        if is_recoverable or event.get("event") == "newcomer ready":
            self.is_replaceable = True
            self.stall.min_stall_s = dict(stalls.MIN_STALL_S, stopped=stalls.MIN_STOPPED_S)

    def send(self, line: bytes) -> None:
        """Queues a line for the rank's control pipe; never blocks."""
        if self.control_fd is not None and len(self.unsent) < MAX_LINE_BYTES:
            self.unsent += line
            self.flush()

    def flush(self) -> None:
        """Writes as much as the control pipe takes."""
        try:
            while self.unsent and self.control_fd is not None:
                del self.unsent[: os.write(self.control_fd, self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, or closed its end
            self.close_control()

    def close_control(self) -> None:
        """Closes the control pipe."""
        if self.control_fd is not None:
            os.close(self.control_fd)
            self.control_fd = None
        self.unsent.clear()

    @property
    def is_finished(self) -> bool:
        """Whether it has ended and its output was read to the end or for :data:`DRAIN_S`.

        Child processes that were asked to end with it have the grace period, too.
        """
        if self.status is None:
            return False
        if self.is_group_signaled and self.process is not None:
            self.is_group_signaled = processes.is_session_alive(self.process.pid)
            if self.is_group_signaled:
                return False
        return not self.fds or time.monotonic() - self.ended_at > DRAIN_S

    def exit_report(self) -> Message:
        status = self.status or 0
        signaled = os.WIFSIGNALED(status)
        evidence: Message = {"state": self.dump.state, "stack": self.dump.stack}
        if self.dump.calls:
            evidence["calls"] = self.dump.calls
        return {
            **({"seen": evidence} if self.dump.is_requested or self.dump.calls else {}),
            "event": "rank ended",
            "rank": self.rank,
            "code": None if signaled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signaled else None,
            "time": self.ended_at,
            "peak_bytes": self.peak_bytes,
        }
