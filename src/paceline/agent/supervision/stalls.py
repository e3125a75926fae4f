"""What holds a process up, from the kernel's tables: a signal, a debugger, a disk, a pipe, a lock.

Nothing here opens the file that a process waits for or looks into its memory: either may be what
does not answer.
"""

from __future__ import annotations

import contextlib
import os
import stat as modes
from typing import Dict, List, Optional, Tuple

from . import processes

# by machine and number: calls that may take long, and where the file is their first argument
_X86 = {
    0: "read", 1: "write", 7: "poll", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
    23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom",
    46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync",
    75: "fdatasync", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid",
    270: "select", 271: "poll", 281: "epoll_wait", 128: "sigtimedwait",
}  # fmt: skip
_GENERIC = {
    63: "read", 64: "write", 73: "poll", 67: "pread64", 68: "pwrite64", 65: "readv", 66: "writev",
    72: "select", 101: "nanosleep", 203: "connect", 202: "accept", 206: "sendto", 207: "recvfrom",
    211: "sendmsg", 212: "recvmsg", 260: "wait4", 25: "fcntl", 32: "flock", 82: "fsync",
    83: "fdatasync", 98: "futex", 115: "clock_nanosleep", 22: "epoll_wait", 95: "waitid",
    137: "sigtimedwait",
}  # fmt: skip
_CALLS = {"x86_64": _X86, "aarch64": _GENERIC, "riscv64": _GENERIC}.get(os.uname().machine, {})
_ON_FILE = {
    "read", "write", "pread64", "pwrite64", "readv", "writev", "sendto", "recvfrom", "sendmsg",
    "recvmsg", "fcntl", "flock", "fsync", "fdatasync", "connect", "accept",
}  # fmt: skip
_FREEZER = ("do_freezer_trap", "__refrigerator", "get_signal")
# calls in which a process sleeps so that a signal wakes it, unless its control group is paused
_WAKES = {
    "poll", "select", "nanosleep", "clock_nanosleep", "wait4", "waitid", "futex", "epoll_wait",
    "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "accept", "sigtimedwait",
}  # fmt: skip
LASTS_S = {"stopped": 2.5, "traced": 2.5, "paused": 2.5, "disk": 10.0, "swapped": 10.0}
REPLACED_S = 0.4  # "stopped" of a rank that others go on without: its end costs no step
_SWAPS = 20.0  # page faults a second that had to wait for a disk
_PRESSURE = 40.0  # percent of the time in which somebody waited for memory


def waits_in(pid: int) -> Dict[str, str]:
    """The system call that the main thread of a process waits in: ``call``, ``on``, ``kernel``.

    ``on`` is the file, as ``/proc/PID/fd`` names it; ``kernel`` the kernel's function. Each is
    empty where it cannot be told: the process runs, or this user may not know.
    """
    found = {"call": "", "on": "", "kernel": _read("/proc/%d/wchan" % pid).strip("0")}
    words = _read("/proc/%d/syscall" % pid).split()
    if words and words[0].isdigit():
        found["call"] = _CALLS.get(int(words[0]), "")
        if found["call"] in _ON_FILE:
            found["on"] = _target(pid, int(words[1], 16))
    return found


def switches(pid: int) -> int:
    """How often the main thread has given up its CPU; it does not while it waits for one thing."""
    return sum(
        int(line.split()[1])
        for line in _read("/proc/%d/task/%d/status" % (pid, pid)).splitlines()
        if "_ctxt_switches:" in line
    )


def file_system(pid: int, path: str) -> str:
    """``nfs4 of server:/export at /data``: what a path of the process lies on; empty if unknown."""
    best: Tuple[int, str] = (-1, "")
    for line in _read("/proc/%d/mountinfo" % pid).splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 2:
            continue
        at = fields[4]
        if (path == at or path.startswith(at.rstrip("/") + "/")) and len(at) >= best[0]:
            best = (len(at), "%s of %s at %s" % (kind[0], kind[1], at))
    return best[1]


def readers(pipe: str, pids: List[int]) -> List[int]:
    """Those of the processes that could read from ``pipe:[…]``."""
    return [pid for pid in pids if any(_reads(pid, fd) for fd in _descriptors(pid, pipe))]


def _descriptors(pid: int, target: str) -> List[str]:
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/%d/fd" % pid):
            with contextlib.suppress(OSError):
                if os.readlink("/proc/%d/fd/%s" % (pid, fd)) == target:
                    found.append(fd)
    return found


def _reads(pid: int, fd: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.lstat("/proc/%d/fd/%s" % (pid, fd)).st_mode & modes.S_IRUSR)
    return False


def _target(pid: int, fd: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/%d/fd/%d" % (pid, fd))
    return ""


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


class Standstill:
    """Since when one process is held up in a way in which no program waits by itself.

    Attributes:
        how: ``stopped`` by a signal, ``traced`` by a debugger, ``paused`` with its control group;
            ``disk``: it waits in the kernel, where no signal reaches it; ``swapped``: most of the
            time goes into fetching its memory from a disk. Empty while it is not held up.
        told: It was told of.
        lasts_s: After how long that is, by ``how``.
    """

    def __init__(self) -> None:
        self.how = ""
        self.told = False
        self.lasts_s = LASTS_S
        self._since = 0.0
        self._switches = -1
        self._faults: Optional[int] = None
        self._looked_at = 0.0

    def look(self, now: float, stat: processes.Stat, worked: bool) -> None:
        """To be called regularly.

        Args:
            now: Seconds of the monotonic clock.
            stat: The process.
            worked: It has used a CPU since the last look.
        """
        how, count = self._how(now, stat, worked), -1
        if how == "disk":  # a slow one answers now and then
            count = switches(stat.pid)
        if how != self.how or count != self._switches:
            self.how, self._switches, self._since = how, count, now
        self._looked_at, self._faults = now, stat.faults

    def _how(self, now: float, stat: processes.Stat, worked: bool) -> str:
        if stat.state in "Tt":
            return "stopped" if stat.state == "T" else "traced"
        faults = 0 if self._faults is None else stat.faults - self._faults
        if faults > _SWAPS * max(now - self._looked_at, 0.1) and memory_pressure() > _PRESSURE:
            return "swapped"
        if worked or stat.state not in "DS":
            return ""
        if _read("/proc/%d/wchan" % stat.pid) in _FREEZER:
            return "paused"
        if stat.state != "D":
            return ""
        return "paused" if waits_in(stat.pid)["call"] in _WAKES else "disk"

    def seconds(self, now: float) -> float:
        """How long it has been so; 0 when it is not."""
        return now - self._since if self.how else 0.0

    def lasts(self, now: float) -> bool:
        """Whether it has been so for longer than a healthy process ever is."""
        return bool(self.how) and self.seconds(now) >= self.lasts_s[self.how]


def memory_pressure() -> float:
    """Percent of the last ten seconds in which some process waited for memory; 0 if unknown."""
    for word in _read("/proc/pressure/memory").split("\n", 1)[0].split():
        if word.startswith("avg10="):
            with contextlib.suppress(ValueError):
                return float(word[6:])
    return 0.0


def on_what(pid: int, how: str) -> str:
    """What it is that holds the process up, in words; empty when that is not known."""
    if how == "traced":
        tracer = [line for line in _read("/proc/%d/status" % pid).splitlines()
                  if line.startswith("TracerPid:")]  # fmt: skip
        number = tracer[0].split()[1] if tracer else "0"
        return "process %s" % number if number != "0" else ""
    if how == "swapped":
        return "memory pressure %.0f %%" % memory_pressure()
    if how != "disk":
        return ""
    waits = waits_in(pid)
    words = [waits["call"] or waits["kernel"]]
    if waits["on"].startswith("/"):
        words += [waits["on"], "(%s)" % file_system(pid, waits["on"])]
    return " ".join(word for word in words if word not in ("", "()"))
