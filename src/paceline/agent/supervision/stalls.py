"""Finds out what blocks a process: a signal, a debugger, a disk, a pipe or a lock.

Uses only the kernel's tables: opening the file that a process waits for, or reading its memory,
could block.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat as modes
from typing import Dict, List, Optional, Tuple, Union

from . import processes
from .processes import read_text

# by machine and number: calls that may take long, and where the file is their first argument
_X86_CALLS = {
    0: "read", 1: "write", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
    23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom",
    46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync",
    75: "fdatasync", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid",
    270: "select", 271: "poll", 281: "epoll_wait", 128: "sigtimedwait",
}  # fmt: skip
_GENERIC_CALLS = {
    63: "read", 64: "write", 73: "poll", 67: "pread64", 68: "pwrite64", 65: "readv", 66: "writev",
    72: "select", 101: "nanosleep", 203: "connect", 202: "accept", 206: "sendto", 207: "recvfrom",
    211: "sendmsg", 212: "recvmsg", 260: "wait4", 25: "fcntl", 32: "flock", 82: "fsync",
    83: "fdatasync", 98: "futex", 115: "clock_nanosleep", 22: "epoll_wait", 95: "waitid",
    137: "sigtimedwait",
}  # fmt: skip
_CALL_NAMES = {"x86_64": _X86_CALLS, "aarch64": _GENERIC_CALLS, "riscv64": _GENERIC_CALLS}.get(
    os.uname().machine, {}
)
_FILE_CALLS = {
    "read", "write", "pread64", "pwrite64", "readv", "writev", "sendto", "recvfrom", "sendmsg",
    "recvmsg", "fcntl", "flock", "fsync", "fdatasync", "connect", "accept",
}  # fmt: skip
_FREEZER_FUNCTIONS = ("do_freezer_trap", "__refrigerator", "get_signal")
# calls in which a process sleeps so that a signal wakes it, unless its control group is paused
_INTERRUPTIBLE_CALLS = {
    "poll", "select", "nanosleep", "clock_nanosleep", "wait4", "waitid", "futex", "epoll_wait",
    "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "accept", "sigtimedwait",
}  # fmt: skip
MIN_STALL_S = {"stopped": 2.5, "traced": 2.5, "paused": 2.5, "disk": 10.0, "swapped": 10.0}
MIN_STOPPED_S = 0.4  # "stopped" of a rank that the others can continue without
MAX_STOPPED_S = 1.0  # after which a stopped fork server or store is killed
_MIN_FAULT_RATE = 20.0  # page faults a second that had to wait for a disk
_MIN_PRESSURE = 40.0  # percent of the time in which somebody waited for memory


def blocking_call(pid: int) -> Dict[str, str]:
    """Returns the system call in which the main thread waits: ``call``, ``on`` and ``kernel``.

    ``on`` is the file as in ``/proc/PID/fd``, ``kernel`` the kernel's function; empty if unknown.
    """
    blocked = {"call": "", "on": "", "kernel": read_text("/proc/%d/wchan" % pid).strip("0")}
    fields = read_text("/proc/%d/syscall" % pid).split()
    if fields and fields[0].isdigit():
        blocked["call"] = _CALL_NAMES.get(int(fields[0]), "")
        if blocked["call"] in _FILE_CALLS:
            blocked["on"] = _fd_target(pid, int(fields[1], 16))
    return blocked


def awaited_child(pid: int) -> int:
    """Returns the pid of the child whose end the main thread waits for; 0: none, or unknown."""
    fields = read_text("/proc/%d/syscall" % pid).split()
    if len(fields) < 2 or not fields[0].isdigit() or _CALL_NAMES.get(int(fields[0])) != "wait4":
        return 0
    child = int(fields[1], 16)
    return child if child < 1 << 31 else 0  # negative: any child


def context_switches(pid: int) -> int:
    """Number of the main thread's context switches: constant while it waits for one thing."""
    status = read_text("/proc/%d/task/%d/status" % (pid, pid))
    return sum(map(int, re.findall(r"_ctxt_switches:\s*(\d+)", status)))


def find_mount(pid: Union[int, str], path: str) -> Tuple[str, str, str]:
    """Returns type, source and mount point of the file system of a process's path, or blanks."""
    best = ("", "", "")
    for line in read_text("/proc/%s/mountinfo" % pid).splitlines():
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if len(fields) < 5 or len(kind) < 2:
            continue
        point = fields[4].replace("\\040", " ")
        is_parent = path == point or path.startswith(point.rstrip("/") + "/")
        if is_parent and len(point) >= len(best[2]):
            best = (kind[0], kind[1], point)
    return best


def pipe_readers(pipe: str, pids: List[int]) -> List[int]:
    """Returns which of the processes can read from ``pipe:[…]``."""
    return [pid for pid in pids if any(_is_reader(pid, fd) for fd in _descriptors(pid, pipe))]


def _descriptors(pid: int, target: str) -> List[str]:
    matches = []
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/%d/fd" % pid):
            with contextlib.suppress(OSError):
                if os.readlink("/proc/%d/fd/%s" % (pid, fd)) == target:
                    matches.append(fd)
    return matches


def _is_reader(pid: int, fd: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.lstat("/proc/%d/fd/%s" % (pid, fd)).st_mode & modes.S_IRUSR)
    return False


def _fd_target(pid: int, fd: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/%d/fd/%d" % (pid, fd))
    return ""


class StallDetector:
    """Detects that a process is blocked in a way in which no program waits by itself.

    Attributes:
        cause: ``stopped`` (signal), ``traced`` (debugger), ``paused`` (control group), ``disk``
            (uninterruptible), ``swapped`` (most time goes into page faults), or empty.
        is_reported: The launcher knows.
        min_stall_s: After how long it is a stall, by ``cause``.
    """

    def __init__(self) -> None:
        self.cause = ""
        self.is_reported = False
        self.min_stall_s = MIN_STALL_S
        self._started_s = 0.0
        self._num_switches = -1
        self._faults: Optional[int] = None
        self._sampled_s = 0.0

    def sample(self, now_s: float, stat: processes.Stat, has_worked: bool) -> None:
        """Updates the cause; call it regularly.

        Args:
            now_s, stat: Seconds of the monotonic clock, and state of the process.
            has_worked: Whether it has used a CPU since the last sample.
        """
        cause, count = self._find_cause(now_s, stat, has_worked), -1
        if cause == "disk":  # a slow one answers now and then
            count = context_switches(stat.pid)
        if cause != self.cause or count != self._num_switches:
            self.cause, self._num_switches, self._started_s = cause, count, now_s
        self._sampled_s, self._faults = now_s, stat.faults

    def _find_cause(self, now_s: float, stat: processes.Stat, has_worked: bool) -> str:
        if stat.state in "Tt":
            return "stopped" if stat.state == "T" else "traced"
        faults = 0 if self._faults is None else stat.faults - self._faults
        min_faults = _MIN_FAULT_RATE * max(now_s - self._sampled_s, 0.1)
        if faults > min_faults and memory_pressure() > _MIN_PRESSURE:
            return "swapped"
        if has_worked or stat.state not in "DS":
            return ""
        if read_text("/proc/%d/wchan" % stat.pid) in _FREEZER_FUNCTIONS:
            return "paused"
        if stat.state != "D":
            return ""
        return "paused" if blocking_call(stat.pid)["call"] in _INTERRUPTIBLE_CALLS else "disk"

    def duration_s(self, now_s: float) -> float:
        """Seconds for which the process has been blocked; 0 if it is not."""
        return now_s - self._started_s if self.cause else 0.0

    def is_stalled(self, now_s: float) -> bool:
        """Whether it has been blocked for longer than a healthy process ever is."""
        return bool(self.cause) and self.duration_s(now_s) >= self.min_stall_s[self.cause]


class StopTimer:
    """Measures for how long signals have stopped processes that no rank replaces."""

    def __init__(self) -> None:
        self._stopped_at: Dict[int, float] = {}  # seconds of the monotonic clock, by pid

    def is_stopped(self, pid: int, now_s: float) -> bool:
        """Samples a process; returns whether it has been stopped for :data:`MAX_STOPPED_S`."""
        stat = processes.read_stat(pid)
        if stat is None or stat.state != "T":
            self._stopped_at.pop(pid, None)
            return False
        return now_s - self._stopped_at.setdefault(pid, now_s) >= MAX_STOPPED_S

    def has_started(self, pid: int) -> bool:
        """Whether the process was stopped when it was last sampled."""
        return pid in self._stopped_at

    def clear(self) -> None:
        """Forgets all processes."""
        self._stopped_at.clear()


def memory_pressure() -> float:
    """Returns the percentage of the last ten seconds with a wait for memory; 0 if unknown."""
    match = re.match(r"some .*?avg10=([\d.]+)", read_text("/proc/pressure/memory"))
    return float(match.group(1)) if match else 0.0


def describe_cause(pid: int, cause: str) -> str:
    """Returns what blocks the process, in words; empty if unknown."""
    if cause == "traced":
        status = read_text("/proc/%d/status" % pid)
        tracer = re.search(r"^TracerPid:\s*([1-9]\d*)", status, re.MULTILINE)
        return "process %s" % tracer.group(1) if tracer else ""
    if cause == "swapped":
        return "memory pressure %.0f %%" % memory_pressure()
    if cause != "disk":
        return ""
    blocked = blocking_call(pid)
    parts = [blocked["call"] or blocked["kernel"]]
    if blocked["on"].startswith("/"):
        parts += [blocked["on"], "(%s of %s at %s)" % find_mount(pid, blocked["on"])]
    return " ".join(part for part in parts if part not in ("", "()"))
