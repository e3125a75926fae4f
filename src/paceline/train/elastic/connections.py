"""gloo's connections, found and cut from outside gloo to free a thread that waits in it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.train.elastic import gloo
from paceline.train.elastic.device_group import DeviceGroup
from paceline.train.reduce import direct

_UNCONNECTED_STATES = (7, 10)  # of TCP: closed, which a new socket is, too, and listening
_POLL_INTERVAL_S = 0.02  # between two looks at what the making of a group begins
_CLOSE_CHECKS, _CLOSE_INTERVAL_S = 10, 0.1  # checks before an open connection is disarmed


class GlooConnections:
    """gloo's connections: the sockets that appear while a process group is made.

    They are gloo's own: ``shutdown`` on them gives its threads the end of the connection, and
    every collective that waits, or begins, an error; gloo closes them. The store's connection is
    shut down, too, for a rank that waits there, but is not closed: a group that was left keeps it.

    While a group is made, a rank may also wait for a connection that a lost rank was to make, or
    try to make one again and again. So sockets are cut until the group is made, and a rank that
    waits gets connections that end at once.

    A connection that gloo has not closed a second later it never will: that wakes its thread
    all the time, until epoll is disarmed (:func:`paceline.train.elastic.gloo.disarm_epoll`).

    Attributes:
        device: The group whose collectives a device runs, which is aborted with them.
    """

    device: DeviceGroup | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, str] = {}  # descriptors, with their targets in /proc/self/fd
        self._closing: dict[int, str] = {}
        self._to_stores: dict[int, str] = {}  # also of groups that were left
        self._earlier: dict[int, str] | None = None  # sockets before the group that is being made
        self._num_ranks = 0  # of that group

    @contextlib.contextmanager
    def tracked(self, ranks: int) -> Iterator[None]:
        """Context in which a group of ``ranks`` ranks is made; tracks the sockets that appear."""
        with self._lock:
            self._earlier, self._num_ranks = open_sockets(), ranks
        try:
            yield
        finally:
            with self._lock:
                opened = self._newly_opened()
                for fd in opened:
                    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
                        direct.retransmit_soon(copy)
                self._open |= opened
                self._earlier = None

    def _newly_opened(self) -> dict[int, str]:
        if self._earlier is None:
            return {}
        return {fd: inode for fd, inode in open_sockets().items() if self._earlier.get(fd) != inode}

    def note_store(self) -> None:
        """Records that the sockets opened so far connect to the group's store."""
        with self._lock:
            self._to_stores |= self._newly_opened()

    def shut_down(self, *, spare_forming: bool = False) -> None:
        """Shuts the connections down, which frees a thread that waits in a collective.

        Call it from another thread; it may be called again.
        """
        if self.device is not None:
            self.device.abort()
        direct.shut_down_all()  # none is made before a group is whole
        with self._lock:
            candidates = {**self._open, **({} if spare_forming else self._newly_opened())}
            closing = {fd: inode for fd, inode in candidates.items() if _shut_down(fd, inode)}
            self._closing |= closing
            # Not of the group that is being made: gloo may still add to its epoll.
            if finished := dict(closing.items() & self._open.items()):
                threading.Thread(target=self._disarm, args=(finished,), daemon=True).start()
            self._open.clear()
            if self._earlier is not None and not spare_forming:
                forming = self._earlier
                threading.Thread(target=self._keep_cutting, args=(forming,), daemon=True).start()

    def all_closed(self) -> bool:
        with self._lock:
            sockets = open_sockets().items()
            self._to_stores = dict(self._to_stores.items() & sockets)
            self._closing = dict((self._closing.items() & sockets) - self._to_stores.items())
            return self._earlier is None and not self._closing

    def _disarm(self, closing: dict[int, str]) -> None:
        """Has epoll ignore connections that gloo leaves open, and counts them as closed.

        This counts checks, not seconds: also in a process that was stopped for a while, gloo's
        thread runs between them. A connection that gloo closes gives a waiting rank an error.
        """
        for _ in range(_CLOSE_CHECKS):
            time.sleep(_CLOSE_INTERVAL_S)
            with self._lock:
                closing = dict(closing.items() & open_sockets().items() - self._to_stores.items())
            if not closing:
                return
        with self._lock:
            for fd, inode in closing.items():
                if gloo.disarm_epoll(fd, inode) and self._closing.get(fd) == inode:
                    del self._closing[fd]

    def _keep_cutting(self, forming: dict[int, str]) -> None:
        """Shuts down the connections that this group still opens, until it is made."""
        while True:
            time.sleep(_POLL_INTERVAL_S)
            with self._lock:
                if self._earlier is not forming:
                    return
                opened = self._newly_opened()
                for fd, inode in opened.items():
                    _shut_down(fd, inode)
            for fd in opened:
                _unblock_accept(fd, self._num_ranks)


def open_sockets() -> dict[int, str]:
    """Returns this process's sockets: the inode (``socket:[1234]``) by descriptor."""
    sockets = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inode = str(entry.readlink())
            if inode.startswith("socket:"):
                sockets[int(entry.name)] = inode
    return sockets


def _unblock_accept(fd: int, ranks: int) -> None:
    """Connects to gloo's listening socket as each rank, so that its accept for one returns."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener:
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        for number in range(ranks):
            with socket.socket(listener.family) as caller:
                caller.settimeout(_POLL_INTERVAL_S * 10)
                caller.connect(listener.getsockname())
                caller.sendall(struct.pack("=q", number))


def _shut_down(fd: int, inode: str) -> bool:
    """Ends this connection, unless its number is another one's by now; returns whether it did."""
    with contextlib.suppress(OSError):
        copy = os.dup(fd)  # from here on it stays what it is
        if f"socket:[{os.fstat(copy).st_ino}]" != inode:
            os.close(copy)
            return False
        with socket.socket(fileno=copy) as connection:
            if _is_connection(connection):
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _is_connection(candidate: socket.socket) -> bool:
    """Whether a socket is connected, or is about to be.

    A socket that is neither may be listening in the next moment, and gloo's thread takes the whole
    process with it (SIGABRT) when it cannot accept any more.
    """
    try:
        state = candidate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:  # no TCP
        candidate.getpeername()  # OSError without a connection
        return True
    return state not in _UNCONNECTED_STATES
