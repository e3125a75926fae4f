"""The agent's view of one rank: its process, its pipes, its activity, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any, Callable, Dict, List, Optional

from ..frames import MAX_OUTPUT
from ..ranks import flight_recorder, stack_dump
from . import gloo_threads, processes, stalls

Message = Dict[str, Any]
Post = Callable[..., None]
DRAIN_S = 1.0  # how long after a rank's end its pipes may stay open (grandchildren hold them)
MAX_LINE_BYTES = 1 << 20
MIN_CPU_SHARE = 0.02  # of a CPU: a rank that uses less is idle
MIN_TICKS = 4.0  # largest error when the ticks of some threads are subtracted from a process's
MAX_INTERVAL_S = 2.0  # over which CPU ticks are counted
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class RankProcess:
    """Reads from, writes to, samples and signals the process of one rank."""

    def __init__(self, rank: int, local_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.process: Optional[processes.Process] = None
        self.status: Optional[int] = None
        self.ended_at = 0.0
        self.is_reported = False
        self.is_group_signaled = False  # its child processes were signalled, too
        self.is_interrupted = False  # it got SIGINT, and its child processes nothing yet
        self._interrupted_children: List[processes.Process] = []  # that it had at that time
        self._children_at = 0.0  # when these get a signal at the latest
        self.fds: Dict[int, str] = {}  # read end -> "out" | "err" | "events"
        self.control_fd: Optional[int] = None  # write end of its control pipe
        self.unsent = bytearray()  # lines that the control pipe has not taken yet
        self._partial = b""  # an unfinished line of the events pipe
        self.event_bytes = 0  # read from the events pipe so far
        self.child_event_bytes = 0  # of these, written by the rank's children
        self.peak_bytes = 0  # of memory
        self.dump = stack_dump.StackDump()
        self.active_at = time.monotonic()  # when it last used a CPU or sent an event
        self.stall = stalls.StallDetector()
        self.is_replaceable = False  # the others continue if it is lost
        self._is_joining = False  # it makes its process group, which SIGINT does not end
        self._interval_start = self.active_at  # of the interval over which CPU ticks are counted
        self._interval_cpu = 0
        self._gloo_loops = gloo_threads.LoopClock()
        self.inspected_gloo_loops = gloo_threads.LoopClock()  # sampled by inspections only
        self._loop_ticks = 0  # of gloo's loops at the interval's start
        self._diagnostic_ticks = 0.0  # spent on the agent's requests in the interval

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
        # an idle process also uses a tick every few seconds
        min_ticks = MIN_TICKS if loop_delta else 1.0
        has_worked = work_ticks > max(min_ticks, MIN_CPU_SHARE * TICKS_PER_S * elapsed_s)
        if has_worked:
            self.active_at = now_s
        self.stall.sample(now_s, stat, has_worked)
        if has_worked or elapsed_s >= MAX_INTERVAL_S:
            self._interval_start, self._interval_cpu = now_s, stat.cpu
            self._loop_ticks, self._diagnostic_ticks = loop_ticks, 0.0

    def open_pipes(self) -> List[int]:
        """Makes the rank's pipes; returns the ends for its process in the fork server's order."""
        child_fds = []
        for name in ("out", "err", "events"):
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            self.fds[read_end] = name
            child_fds.append(write_end)
        read_end, self.control_fd = os.pipe()
        os.set_blocking(self.control_fd, False)
        return [*child_fds, read_end]

    def read(self, fd: int, post: Post) -> None:
        """Reads from one of its pipes and posts what the rank has written there."""
        name = self.fds[fd]
        if name == "err":  # an exception is to be known before its text is printed
            for events_fd in [fd for fd, name in self.fds.items() if name == "events"]:
                self.read(events_fd, post)
        try:
            data = os.read(fd, MAX_OUTPUT)
        except BlockingIOError:
            return
        if not data:
            del self.fds[fd]
            os.close(fd)
        elif name == "events":
            for event in self.parse_events(data):
                with contextlib.suppress(ValueError):  # too long; the program may write anything
                    post({"event": "said", "rank": self.rank, "data": event})
        else:
            post({"event": "output", "rank": self.rank, "stream": name}, data)

    def close_pipes(self, post: Post) -> None:
        """Posts what is left in its pipes and closes them."""
        for fd in list(self.fds):
            if fd in self.fds:  # reading one may end another
                self.read(fd, post)
        for fd in self.fds:
            os.close(fd)
        self.fds = {}
        self.close_control()

    def parse_events(self, data: bytes) -> List[Message]:
        """Takes data of the events pipe; returns its complete events for the launcher."""
        self.event_bytes += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            self._partial = b""
        events = []
        for line in lines:
            try:  # the user's code may write there too
                event = json.loads(line)
            except (ValueError, RecursionError):
                self.dump.add_line(line)
                continue
            if isinstance(event, dict) and event.get("kind") == flight_recorder.KIND:
                self.dump.set_calls(*map(event.get, ("calls", "cpu_s", "unfinished")))
            elif isinstance(event, dict):
                self.active_at = time.monotonic()
                self.note_event(event)
                events.append(event)
        return events

    def note_event(self, event: Message) -> None:
        """Notes whether the job can continue without this rank; then stops are reported sooner.

        Also notes whether it is making its process group.
        """
        if event.get("event") in ("joining", "world joined"):
            self._is_joining = event["event"] == "joining"
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

    def signal(self, signum: int, is_program: bool, grace_s: float = 0.0) -> None:
        """Signals the rank, and its process group unless the rank handles the signal itself.

        A rank that saves first still needs its data workers. A program other than Python may be a
        shell, whose handler runs only after its child.

        SIGINT is a user's request to stop. It turns into SIGTERM unless the rank handles only
        SIGINT, as a Python script does by default.
        """
        process = self.process
        if process is None or processes.identify(process.pid) != process:
            return
        if signum == signal.SIGINT and (is_program or not self._handles_interrupt(process.pid)):
            signum = signal.SIGTERM
        if not is_program and processes.has_handler(process.pid, signum):
            self.is_interrupted = signum == signal.SIGINT
            if self.is_interrupted:
                self._children_at = time.monotonic() + grace_s / 2
                self._interrupted_children = processes.members_of_session(
                    process.pid, parent=process.pid
                )
                self.stop_children()  # the one for which it waits: Python would kill it soon
            processes.send(process, signum)
            signum = signal.SIGCONT
        else:
            self.is_group_signaled = signum != signal.SIGKILL
        with contextlib.suppress(OSError):
            try:
                os.killpg(process.pid, signum)
                os.killpg(process.pid, signal.SIGCONT)  # a stopped process takes no signal
            except ProcessLookupError:  # it does not lead its group yet, so it has none
                os.kill(process.pid, signum)

    def _handles_interrupt(self, pid: int) -> bool:
        """Whether SIGINT lets the rank save.

        If it only waits for a program that saves on SIGTERM, Python would kill that program soon.
        """
        if self._is_joining:
            return False
        child = stalls.awaited_child(pid)
        child_saves = bool(child) and processes.has_handler(child, signal.SIGTERM)
        return not child_saves and processes.stop_signal(pid) == signal.SIGINT

    def stop_children(self) -> None:
        """Signals child processes of an interrupted rank once it has ended or waits for one.

        Before, it may need them to save; so they get the signal after half of the grace period at
        the latest. What it starts after the interrupt runs until it has ended, such as a program
        that copies what was saved.
        """
        if not self.is_interrupted or self.process is None:
            return
        if self.status is not None:
            self.is_interrupted, self.is_group_signaled = False, True
            for member in processes.members_of_session(self.process.pid):
                processes.send(member, processes.stop_signal(member.pid))
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGCONT)
        elif self._interrupted_children:
            awaited = stalls.awaited_child(self.process.pid)
            is_awaited = any(child.pid == awaited for child in self._interrupted_children)
            if is_awaited or time.monotonic() > self._children_at:
                for child in self._interrupted_children:
                    processes.send(child, processes.stop_signal(child.pid))
                self._interrupted_children = []

    def kill_group(self) -> None:
        """SIGKILLs the rank's process group, whose leader may have exited."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def stall_report(self, now_s: float) -> Optional[Message]:
        """Returns an event once the rank stalls, and one once it continues; else ``None``."""
        is_stalled = self.stall.is_stalled(now_s)
        if self.process is None or is_stalled == self.stall.is_reported:
            return None
        self.stall.is_reported = is_stalled
        if not is_stalled:
            return {"event": "rank thawed", "rank": self.rank}
        pid, cause = self.process.pid, self.stall.cause
        return {
            "event": "rank frozen",
            "rank": self.rank,
            "how": cause,
            "on": stalls.describe_cause(pid, cause),
            "pid": pid,
            "seconds": round(self.stall.duration_s(now_s), 3),
        }

    def exit_report(self) -> Message:
        """Returns the event that reports the rank's end."""
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
