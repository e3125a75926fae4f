"""Identifies processes by pid and start time, because a pid alone may have been reused.

A job's processes carry its token in their environment, or descend from one that does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional, Set, Tuple, Union

# what may end a rank: it waits while a fork is not yet the rank, which would lose it otherwise
EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
SPARE_DESCRIPTORS = 64  # for what else a process opens
MAX_KILL_ROUNDS = 50
_TIME_WAIT, _LISTEN = "06", "0A"  # states in /proc/net/tcp


class Process(NamedTuple):
    """Identity of a process on this machine."""

    pid: int
    start: int  # field 22 of /proc/PID/stat


class Stat(NamedTuple):
    pid: int
    parent: int
    session: int
    state: str
    start: int
    cpu: int = 0  # clock ticks of its work so far, and of that of children it has waited for
    faults: int = 0  # on pages that had to come from a disk
    name: str = ""  # at most 15 bytes of it


def parse_stat(text: str) -> Stat:
    """Reads one ``/proc/PID/stat`` line; the command in parentheses may hold anything."""
    pid, remainder = text.split(" ", 1)
    end = remainder.rindex(")")
    fields = remainder[end + 2 :].split()
    return Stat(
        pid=int(pid),
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        cpu=sum(int(ticks) for ticks in fields[11:15]),
        faults=int(fields[9]),
        name=remainder[1:end],
    )


def read_stat(pid: int, thread: Optional[int] = None) -> Optional[Stat]:
    """Reads the state of a process or of one of its threads; ``None`` if it does not exist."""
    subfolder = "" if thread is None else "/task/%d" % thread
    try:
        return parse_stat(Path("/proc/%d%s/stat" % (pid, subfolder)).read_text(errors="replace"))
    except (OSError, ValueError):
        return None


def read_text(path: Union[str, Path]) -> str:
    """Returns a small file without surrounding white space; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def tcp_sockets(pid: Union[int, str] = "self") -> List[List[str]]:
    """Returns the fields of each TCP socket in a network namespace, as in /proc/net/tcp."""
    tables = (read_text("/proc/%s/net/%s" % (pid, name)) for name in ("tcp", "tcp6"))
    rows = (line.split() for table in tables for line in table.splitlines())
    return [fields for fields in rows if fields and fields[0] != "sl"]


def has_connections(port: int) -> bool:
    """Whether a connection exists at this local port, or is being made."""
    local = ":%04X" % port
    return any(
        fields[1].endswith(local) and fields[3] not in (_LISTEN, _TIME_WAIT)
        for fields in tcp_sockets()
    )


def bytes_moved(pid: int) -> int:
    """Returns the bytes of a process's reads and writes, without ``send``, ``recv``; 0: unknown."""
    return sum(_io_bytes(pid))


def bytes_sent(pid: int) -> int:
    """Returns the bytes that a process has written, without those queued in TCP connections."""
    return max(_io_bytes(pid)[1] - _unacked_bytes(pid), 0)


def _io_bytes(pid: int) -> Tuple[int, int]:
    """Returns the bytes that a process has read and written, as two numbers."""
    fields = dict(line.split(": ") for line in read_text("/proc/%d/io" % pid).splitlines())
    return int(fields.get("rchar", 0)), int(fields.get("wchar", 0))


def _unacked_bytes(pid: int) -> int:
    sockets = sockets_of([pid])
    queues = [fields[4] for fields in tcp_sockets(pid) if int(fields[9]) in sockets]
    return sum(int(queue.split(":")[0], 16) for queue in queues)


def sockets_of(pids: Iterable[int]) -> Set[int]:
    """Returns the inodes of all sockets of these processes."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir("/proc/%d/fd" % pid):
                with contextlib.suppress(OSError):
                    name = os.readlink("/proc/%d/fd/%s" % (pid, fd))
                    if name.startswith("socket:["):
                        inodes.add(int(name[len("socket:[") : -1]))
    return inodes


def identify(pid: int) -> Optional[Process]:
    """Returns the identity of a running process; ``None`` if it is gone or a zombie."""
    stat = read_stat(pid)
    return None if stat is None or stat.state in "ZX" else Process(stat.pid, stat.start)


def all_stats() -> Dict[int, Stat]:
    """Returns the state of every visible process, by pid."""
    stats = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {stat.pid: stat for stat in stats if stat is not None}


def descendants(roots: Iterable[int], stats: Dict[int, Stat]) -> Set[int]:
    """Returns the pids of all descendants of ``roots``."""
    children: Dict[int, List[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    members: Set[int] = set()
    pending = list(roots)
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in members:
                members.add(child)
                pending.append(child)
    return members


def with_token(token: str, stats: Dict[int, Stat]) -> Set[int]:
    """Returns pids of this user's processes with the job's token in their environment."""
    entry = ("PACELINE_JOB_TOKEN=" + token).encode()
    members = set()
    for pid in stats:
        with contextlib.suppress(OSError):
            if entry in Path("/proc/%d/environ" % pid).read_bytes().split(b"\0"):
                members.add(pid)
    return members


def job_processes(token: str, roots: Iterable[int], spared: Iterable[int]) -> List[Process]:
    """Returns a job's living processes, by token or below ``roots``, except ``spared``."""
    stats = all_stats()
    marked = with_token(token, stats) if token else set()
    children = descendants(set(roots) | marked, stats)
    excluded = set(spared) | {os.getpid()}
    return [
        Process(pid, stats[pid].start)
        for pid in sorted((marked | children) - excluded)
        if stats[pid].state not in "ZX"
    ]


def send(process: Process, signum: int) -> bool:
    """Signals exactly this process; returns False if it is gone or its pid was reused."""
    if identify(process.pid) != process:
        return False
    try:
        os.kill(process.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def has_handler(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal."""
    match = re.search(r"^SigCgt:\s*(\w+)", read_text("/proc/%d/status" % pid), re.MULTILINE)
    return match is not None and bool(int(match.group(1), 16) >> (signum - 1) & 1)


def stop_signal(pid: int) -> int:
    """Returns the signal with which a user's request to stop lets a Python process save.

    SIGINT if it handles that only, as every Python process does without a handler of its own.
    """
    handles_interrupts = has_handler(pid, signal.SIGINT) and not has_handler(pid, signal.SIGTERM)
    return signal.SIGINT if handles_interrupts else signal.SIGTERM


def members_of_session(session: int, parent: Optional[int] = None) -> List[Process]:
    """Returns the living processes of a session, or those that have this parent."""
    return [
        Process(stat.pid, stat.start)
        for stat in all_stats().values()
        if stat.session == session and parent in (None, stat.parent) and stat.state not in "ZX"
    ]


def is_session_alive(session: int) -> bool:
    """Whether any process of this session runs, even if its leader has ended."""
    return bool(members_of_session(session))


def wait_for_exit(process: Process, seconds: float) -> bool:
    """Waits until a process is gone and reaped; False after the time.

    A zombie's other threads may still hold its sockets.
    """
    deadline = time.monotonic() + seconds
    while (stat := read_stat(process.pid)) is not None and stat.start == process.start:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def kill_job(token: str, roots: Iterable[int], spared: Iterable[int]) -> int:
    """SIGKILLs a job's processes until none is left, for they may fork; returns how many."""
    roots, spared = list(roots), list(spared)
    killed = 0
    for _ in range(MAX_KILL_ROUNDS):
        alive = job_processes(token, roots, spared)
        if not alive:
            break
        killed += sum(send(process, signal.SIGKILL) for process in alive)
        time.sleep(0.01)
    return killed


def _prctl(option: int, value: Union[int, bytes]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(%d)" % option)


def set_name(name: str) -> None:
    """Names this process in the kernel's tables; 15 bytes are kept."""
    _prctl(PR_SET_NAME, name.encode()[:15])


def die_with_parent(parent: int) -> None:
    """Asks the kernel for SIGKILL when the parent dies; ends at once if it already has."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def raise_descriptor_limit(count: int) -> None:
    """Raises the soft limit of open files, if need be, so that ``count`` more fit.

    No further than that: children inherit it. If the hard limit is lower, raises it up to that, and
    OSError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = len(os.listdir("/dev/fd"))
    except OSError:
        num_open = SPARE_DESCRIPTORS
    needed = num_open + count + SPARE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    is_enough = hard == resource.RLIM_INFINITY or needed <= hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if is_enough else hard, hard))
    if not is_enough:
        text = "%d open files are needed, and the hard limit is %d (ulimit -Hn)" % (needed, hard)
        raise OSError(errno.EMFILE, text)
