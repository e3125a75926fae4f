"""gloo's threads, as the system lists them, and the epoll registration that keeps one awake.

When a collective has failed in the middle of a message, gloo leaves the rest in the socket. As long
as it lies there, epoll wakes gloo's thread again and again, which takes a whole CPU. Shutting the
connection down changes nothing, for gloo never reads its end. So epoll
is made to report the connection once more and never again (:func:`disarm_epoll`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOOPS = "gloo_tcp_loop"  # move what goes over connections
WORKERS = "pt_gloo_runloop"  # run collectives

_IDLE_CHECKS = 3
_MAX_WAIT_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")
_MODIFY = 3  # EPOLL_CTL_MOD
_IO_EVENTS = select.EPOLLIN | select.EPOLLOUT
_REGISTERED = re.compile(
    r"^tfd: +(\d+) +events: +([0-9a-f]+) +data: +([0-9a-f]+) +pos:\d+ +ino:([0-9a-f]+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Task:
    """A thread of this process.

    Attributes:
        state: As in proc(5): R when it runs, or wants to.
        cpu_s: CPU time that it has used, in seconds.
    """

    number: int
    name: str
    state: str
    cpu_s: float

    @property
    def is_gloo(self) -> bool:
        return self.name in (LOOPS, WORKERS)


def tasks() -> Iterator[Task]:
    """Yields the threads of this process, without those that are just ending."""
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, ValueError):
            text = (folder / "stat").read_text(errors="replace")
            name, _, numbers = text.partition("(")[2].rpartition(")")
            fields = numbers.split()
            cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
            yield Task(int(folder.name), name, fields[0], cpu_s)


def wait_for_idle_workers() -> None:
    """Waits until gloo's worker threads are idle, at most two seconds.

    Sleeping releases the interpreter's lock, so a worker that needs it gets it and is seen running.
    """
    deadline = time.monotonic() + _MAX_WAIT_S
    idle = 0
    while idle < _IDLE_CHECKS and time.monotonic() < deadline:
        time.sleep(0.002)
        busy = any(task.name == WORKERS and task.state == "R" for task in tasks())
        idle = 0 if busy else idle + 1


class _Event(ctypes.Structure):
    """struct epoll_event, which on x86-64 has no gap."""

    if platform.machine() in ("x86_64", "AMD64"):
        _pack_ = 1
        _layout_ = "ms"  # required by later versions of Python
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]


def disarm_epoll(fd: int, inode: str) -> bool:
    """Makes epoll report a connection that was cut only once more.

    Nothing else changes: gloo keeps the descriptor, and can take it out of its epoll and close it
    as ever. gloo may do so at this moment, and the number may get another meaning. That does no
    harm. What is changed is a registration, which belongs to one number, one connection and one
    epoll, and ends with any of them. Each group has an epoll of its own, and no connection comes to
    it once the group is made: so there is this registration, or none.

    Returns:
        Whether an epoll knew it.
    """
    is_known = False
    for epoll in _epolls():
        try:
            copy = os.dup(epoll)  # from here on it stays what it is
        except OSError:
            continue
        try:
            for number, events, data, ino in _registered(copy):
                if number == fd and f"socket:[{ino}]" == inode and events & _IO_EVENTS:
                    is_known = _disarm(copy, fd, data) or is_known
        finally:
            os.close(copy)
    return is_known


def _epolls() -> Iterator[int]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()) == "anon_inode:[eventpoll]":
                yield int(entry.name)


def _registered(epoll: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields descriptor, events, data and inode of each registration, if the kernel shows them."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
        for fd, events, data, inode in _REGISTERED.findall(text):
            yield int(fd), int(events, 16), int(data, 16), int(inode, 16)


def _disarm(epoll: int, fd: int, data: int) -> bool:
    """Registers only for the connection's end, reported once; returns whether that worked."""
    event = _Event(select.EPOLLONESHOT, data)
    changed: int = ctypes.CDLL(None).epoll_ctl(epoll, _MODIFY, fd, ctypes.byref(event))
    return changed == 0
