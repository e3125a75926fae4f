"""Carries connections to the rendezvous store between hosts, from loopback to loopback.

The store listens on the loopback interface of its host only. On each other host, a *forwarder*
accepts the ranks' connections on loopback and connects to the *gateway* on the store's host, which
connects to the store. Both first prove that they know the job's key (see ``challenge.py``). On the
store's host, the ranks connect to a *local gateway* on loopback. It and the forwarders close the
connections of other users of the host; the store accepts only callers that a gateway has bound to a
port.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import selectors
import socket
import struct
import threading
import time
from typing import Dict, List, Optional, Tuple

from ..challenge import Handshake, caller_handshake, listener_handshake
from ..ranks import peer_filters
from ..reconnection import PROOF_TIMEOUT_S
from ..surveys import probe
from . import processes

MAX_UNPROVEN = 512  # connections that may be proving the key; beyond that the oldest goes
BACKLOG = 1024
REDIAL_S = 0.1  # after the gateway has dropped a connection that was proving the key
CLOSE_TIMEOUT_S = 1.0
CHUNK_BYTES = 1 << 16

NO_USER, UNKNOWN_USER = -1, -2
_MAPPED = "0" * 16 + "%08X" % struct.unpack("=I", b"\0\0\xff\xff")[0]  # ::ffff:
_MAX_LINE = 200  # characters of /proc/net/tcp behind the addresses

Address = Tuple[str, int]


class _Link:
    """A connection of a forwarder or a gateway on both of its sides.

    Attributes:
        inner: Its side on loopback; a gateway connects it after the proof.
        outer: Its side to the other host; ``None`` until a forwarder tries again.
        deadline: When it has to be proven.
        dial_at: When a forwarder without ``outer`` connects.
        unsent: What has to be written to a side before more is read from the opposite one.
    """

    def __init__(self, inner: Optional[socket.socket], outer: Optional[socket.socket]) -> None:
        self.inner, self.outer = inner, outer
        self.deadline = time.monotonic() + PROOF_TIMEOUT_S
        self.dial_at = 0.0
        self.handshake: Optional[Handshake] = None
        self.missing, self.received = 0, b""
        self.unsent: Dict[socket.socket, bytes] = {}

    @property
    def sides(self) -> List[socket.socket]:
        return [side for side in (self.inner, self.outer) if side is not None]


class StoreRelay:
    """Forwarder or gateway: one thread, which serves all connections until :meth:`close`.

    Args:
        listener: Of a gateway on an address that the other hosts reach, else on loopback.
        target: Address and port to connect to: the gateway, or the store.
        key: Of the job; ``None`` for a local gateway.
        is_gateway: The callers are other hosts.
        port_filter: Of the store, on its host.
    """

    def __init__(
        self,
        listener: socket.socket,
        target: Address,
        key: Optional[bytes],
        is_gateway: bool,
        port_filter: Optional[peer_filters.PortFilter] = None,
    ) -> None:
        self._listener, self._target = listener.dup(), target
        self._key, self._is_gateway = key, is_gateway
        self._port_filter = port_filter
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._unproven: Dict[_Link, None] = {}  # oldest first
        self._links: Dict[_Link, None] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for waking in (self._listener, self._wake_read):
            self._selector.register(waking, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="paceline-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections, and listens no more."""
        self._wake_write.close()
        self._thread.join(CLOSE_TIMEOUT_S)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select(self._check_deadlines()):
                if key.fileobj is self._wake_read:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._links:  # not dropped in this round
                    self._handle(key.data, key.fileobj, events)  # type: ignore[arg-type]

    def _end(self) -> None:
        for link in list(self._links):
            self._drop(link)
        for sock in (self._listener, self._wake_read):
            sock.close()
        self._selector.close()

    def _check_deadlines(self) -> Optional[float]:
        """Drops connections that took too long; returns seconds until the next check."""
        current = time.monotonic()
        while self._unproven and next(iter(self._unproven)).deadline <= current:
            self._drop_oldest()
        redialing = () if self._is_gateway else [link for link in self._unproven if not link.outer]
        for link in redialing:
            if link.dial_at <= current:
                self._dial(link)
        if not self._unproven:
            return None
        due = min([next(iter(self._unproven)).deadline, *(link.dial_at for link in redialing)])
        return max(0.0, due - current)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._drop_oldest()
                time.sleep(REDIAL_S)
            return
        peer_filters.detach_filter(accepted)
        if not self._is_gateway and peer_user(accepted) not in (os.getuid(), UNKNOWN_USER):
            accepted.close()
            return
        _prepare(accepted)
        if self._key is None:
            link = _Link(None, accepted)
            self._links[link] = None
            self._selector.register(accepted, selectors.EVENT_READ, link)
            self._join(link)
            return
        if len(self._unproven) >= MAX_UNPROVEN:
            self._drop_oldest()
        link = _Link(None, accepted) if self._is_gateway else _Link(accepted, None)
        self._links[link] = self._unproven[link] = None
        if self._is_gateway:
            self._begin(link)
        else:
            self._dial(link)

    def _dial(self, link: _Link) -> None:
        link.dial_at = time.monotonic() + REDIAL_S
        with contextlib.suppress(OSError):  # too many open files
            link.outer = _connect(self._target, self._port_filter)
            self._begin(link)

    def _begin(self, link: _Link) -> None:
        """Begins the proof on the side to the other host."""
        assert link.outer is not None
        assert self._key is not None
        link.handshake = (
            listener_handshake(self._key) if self._is_gateway else caller_handshake(self._key)
        )
        self._selector.register(link.outer, selectors.EVENT_READ, link)
        self._send(link, *next(link.handshake))

    def _send(self, link: _Link, text: str, answer_length: int) -> None:
        """Sends a short text, for which the socket has room."""
        link.missing, link.received = answer_length, b""
        if text and link.outer is not None:
            with contextlib.suppress(OSError):  # the next read fails, too
                link.outer.send(text.encode())

    def _handle(self, link: _Link, side: socket.socket, events: int) -> None:
        try:
            if link in self._unproven:
                self._prove(link)
                return
            if events & selectors.EVENT_WRITE:
                self._write(link, side, b"")
            if events & selectors.EVENT_READ:
                self._forward(link, side)
        except BlockingIOError:
            pass
        except OSError:
            self._fail(link)
        except ValueError:
            self._drop(link)

    def _prove(self, link: _Link) -> None:
        assert link.outer is not None
        assert link.handshake is not None
        data = link.outer.recv(link.missing - len(link.received))
        if not data:
            raise ConnectionResetError
        link.received += data
        if len(link.received) < link.missing:
            return
        try:
            self._send(link, *link.handshake.send(link.received.decode("latin-1")))
        except StopIteration as done:
            self._send(link, done.value, 0)
            self._join(link)

    def _join(self, link: _Link) -> None:
        """Forwards from now on what arrives on either side."""
        self._unproven.pop(link, None)
        if link.inner is None:
            try:
                link.inner = _connect(self._target, self._port_filter)
            except OSError:  # too many open files
                self._drop(link)
                return
        self._selector.register(link.inner, selectors.EVENT_READ, link)

    def _forward(self, link: _Link, side: socket.socket) -> None:
        data = side.recv(CHUNK_BYTES)
        if not data:
            raise ConnectionResetError
        (opposite,) = (other for other in link.sides if other is not side)
        self._write(link, opposite, data)

    def _write(self, link: _Link, side: socket.socket, data: bytes) -> None:
        """Writes to one side; until all is written, nothing more is read from the opposite one."""
        former = link.unsent.pop(side, b"")
        unsent = former + data
        with contextlib.suppress(BlockingIOError):
            unsent = unsent[side.send(unsent) :]
        if unsent:
            link.unsent[side] = unsent
        if bool(unsent) == bool(former):
            return
        for reader, writer in zip(link.sides, reversed(link.sides)):
            reads = 0 if writer in link.unsent else selectors.EVENT_READ
            writes = selectors.EVENT_WRITE if reader in link.unsent else 0
            self._watch(link, reader, reads | writes)

    def _watch(self, link: _Link, side: socket.socket, events: int) -> None:
        key = self._selector.get_map().get(side)
        if key is None and events:
            self._selector.register(side, events, link)
        elif key is not None and not events:
            self._selector.unregister(side)
        elif key is not None and key.events != events:
            self._selector.modify(side, events, link)

    def _fail(self, link: _Link) -> None:
        """Drops a connection that has ended; a forwarder that is not proven connects again."""
        if self._is_gateway or link not in self._unproven or link.outer is None:
            self._drop(link)
            return
        self._close_side(link.outer)
        link.outer, link.dial_at = None, time.monotonic() + REDIAL_S

    def _drop_oldest(self) -> None:
        if self._unproven:
            self._drop(next(iter(self._unproven)))

    def _drop(self, link: _Link) -> None:
        self._unproven.pop(link, None)
        del self._links[link]
        for side in link.sides:
            self._close_side(side)

    def _close_side(self, side: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(side)
        side.close()


def _connect(
    target: Address, port_filter: Optional[peer_filters.PortFilter] = None
) -> socket.socket:
    """Begins to connect; if that fails, the first use of the socket raises."""
    sock = socket.socket(probe.family_of(target[0]), socket.SOCK_STREAM)
    try:
        _prepare(sock)
        if port_filter is not None and port_filter.is_attached:
            sock.bind((target[0], 0))
            port_filter.admit(sock)
        sock.connect_ex(target)
    except OSError:
        sock.close()
        raise
    return sock


def peer_user(connection: socket.socket) -> int:
    """Returns the user at the other end of a connection within this host, as the kernel says.

    :data:`NO_USER` if that end is closed, :data:`UNKNOWN_USER` if the kernel does not say it.
    """
    try:
        names = connection.getpeername()[:2], connection.getsockname()[:2]
    except OSError:
        return NO_USER
    # an IPv6 socket of the caller has IPv4 addresses at the end of mapped ones
    prefixes = ("", _MAPPED) if probe.family_of(names[0][0]) == socket.AF_INET else ("",)
    text = processes.tcp_table()
    for prefix in prefixes:
        ends = " %s%s %s%s " % (prefix, _table_entry(*names[0]), prefix, _table_entry(*names[1]))
        _, found, line = text.partition(ends)
        if found:
            fields = line[:_MAX_LINE].split()
            user, inode = fields[4], fields[6]
            return int(user) if inode != "0" else NO_USER
    return NO_USER if _knows_users() else UNKNOWN_USER


def _table_entry(address: str, port: int) -> str:
    """Returns an address and port as in /proc/net/tcp."""
    packed = socket.inet_pton(probe.family_of(address), address)
    words = struct.unpack("=%dI" % (len(packed) // 4), packed)
    return "%s:%04X" % ("".join("%08X" % word for word in words), port)


@functools.lru_cache(maxsize=None)
def _knows_users() -> bool:
    """Whether /proc/net/tcp has this process's sockets; some sandboxes have no such table."""
    with contextlib.closing(probe.listen("127.0.0.1")) as listener:
        own = _table_entry(*listener.getsockname())
        return " %s " % own in processes.tcp_table()


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # the connection has ended
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
