"""Carries connections between hosts, from loopback to loopback.

The rendezvous store listens on the loopback interface of its host only. On each other host, a
*forwarder* accepts the ranks' connections on loopback and connects to the *gateway* on the store's
host, which connects to the store. Both first prove that they know the job's key (see
``challenge.py``). On the store's host, the ranks connect to a *local gateway* on loopback. It and
the forwarders close the connections of other users of the host; the store accepts only callers that
a gateway has bound to a port.

In an encrypted job, forwarder and gateway talk TLS (see ``encryption.py``), and all connections
between ranks take this way (see ``tunnels.py``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Deque, Dict, List, Optional, Tuple

from ..challenge import Handshake, caller_handshake, listener_handshake
from ..ranks import peer_filters
from ..reconnection import PROOF_TIMEOUT_S
from ..surveys import probe
from . import socket_users

if TYPE_CHECKING:
    from .encryption import Encryption, TlsSocket

MAX_UNPROVEN = 512  # connections that may be proving the key; beyond that the oldest goes
UNPROVEN_SHARE = 8  # at most one of so many descriptors is for them; an agent has two relays
PAUSE_S = 0.1  # after the limit of open files was reached
BACKLOG = 1024
REDIAL_S = 0.1  # after the gateway has dropped a connection that was proving the key
CLOSE_TIMEOUT_S = 1.0
CHUNK_BYTES = 1 << 16
PARTIAL_TIMEOUT_S = 30.0  # for the rest of a TLS record: then its length was changed
KEEPALIVE_S = 5  # between the questions by which the other host shows that it can be reached
MAX_KEEPALIVES = 127  # the most: agents and launcher decide whether a host is lost
MAX_RETRY_S = 120.0  # until TCP sends a record's rest again, after the other host was cut off
MIN_STALLS = 3  # of connections in a row to one host, before their proof, that show a change
_LAST_ACK_MS = struct.Struct("=56xI")  # of struct tcp_info in linux/tcp.h
REQUEST_CHARS = 20  # addresses of source and target, and port

Address = Tuple[str, int]


@dataclass(eq=False)
class Route:
    """Where the connections that a listening socket accepts lead.

    Attributes:
        target: Address and port to connect to. The ranks' address here, without a port, for a
            gateway whose callers name a port.
        key: Of the job; ``None`` for a local gateway.
        is_gateway: The callers are other hosts.
        port_filter: Of the store, on its host.
        request: What a forwarder asks of the gateway: see ``tunnels.py``.
    """

    target: Address
    key: Optional[bytes]
    is_gateway: bool
    port_filter: Optional[peer_filters.PortFilter] = None
    request: str = ""

    @property
    def request_length(self) -> int:
        """Characters of a caller's request."""
        return REQUEST_CHARS if self.is_gateway and not self.target[1] else 0


class _Link:
    """A connection of a forwarder or a gateway on both of its sides.

    Attributes:
        inner: Its side on loopback; a gateway connects it after the proof.
        outer: Its side to the other host; ``None`` until a forwarder tries again.
        host: Address of the other host.
        deadline: When it has to be proven.
        dial_at: When a forwarder without ``outer`` connects.
        unsent: What has to be written to a side before more is read from the opposite one.
        ended: The side that has ended, while the opposite one still gets what came before.
    """

    def __init__(
        self,
        route: Route,
        inner: Optional[socket.socket],
        outer: Optional[socket.socket],
        host: str,
    ) -> None:
        self.route, self.host = route, host
        self.inner, self.outer = inner, outer
        self.deadline = time.monotonic() + PROOF_TIMEOUT_S
        self.dial_at = 0.0
        self.handshake: Optional[Handshake] = None
        self.missing, self.received = 0, b""
        self.unsent: Dict[socket.socket, bytes] = {}
        self.ended: Optional[socket.socket] = None

    @property
    def sides(self) -> List[socket.socket]:
        return [side for side in (self.inner, self.outer) if side is not None]


class Relay:
    """Forwarders and gateways: one thread, which serves all connections until :meth:`close`.

    Args:
        encryption: Of the connections between hosts.
    """

    def __init__(self, encryption: Optional[Encryption] = None) -> None:
        self._encryption = encryption
        self._routes: Dict[socket.socket, Route] = {}
        self._paused: Dict[socket.socket, float] = {}  # listeners, and when they go on
        self._unproven: Dict[_Link, None] = {}  # callers of gateways, oldest first
        self._dialing: Dict[_Link, None] = {}  # of forwarders, which wait for a gateway's proof
        self._links: Dict[_Link, None] = {}
        # encrypted links that have a part of a record, and since when, oldest first
        self._partial: Dict[_Link, float] = {}
        self._stalls: Dict[str, int] = {}  # by host: connections in a row that stalled
        self._selector = selectors.DefaultSelector()
        self._orders: Deque[Tuple[socket.socket, Optional[Route]]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="paceline-relay", daemon=True)
        self._thread.start()

    def listen(self, listener: socket.socket, route: Route) -> socket.socket:
        """Serves a listening socket, of which the relay takes a copy; returns the copy.

        It is one on an address that the other hosts reach for a gateway, else one on loopback.
        """
        copy = listener.dup()
        copy.listen(BACKLOG)
        copy.setblocking(False)
        self._order(copy, route)
        return copy

    def end_listening(self, copy: socket.socket) -> None:
        """Closes a listening socket; its connections stay."""
        self._order(copy, None)

    def _order(self, listener: socket.socket, route: Optional[Route]) -> None:
        self._orders.append((listener, route))
        try:
            self._wake_write.send(b"w")
        except OSError:  # the thread has ended
            listener.close()

    def close(self) -> None:
        """Ends all connections, and listens no more."""
        self._wake_write.close()
        self._thread.join(CLOSE_TIMEOUT_S)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        finally:  # also after an unexpected error: nobody must wait for a dead thread
            self._end()

    def _serve(self) -> bool:
        """Waits for the next events and handles them; returns whether to go on."""
        for key, events in self._selector.select(self._check_deadlines()):
            if key.fileobj is self._wake_read:
                if not self._wake_read.recv(CHUNK_BYTES):
                    return False
                self._follow_orders()
            elif key.fileobj in self._routes:
                self._accept(key.fileobj)
            elif key.data in self._links:  # not dropped in this round
                self._handle(key.data, key.fileobj, events)  # type: ignore[arg-type]
        return True

    def _follow_orders(self) -> None:
        while self._orders:
            listener, route = self._orders.popleft()
            if route is not None:
                self._routes[listener] = route
                self._selector.register(listener, selectors.EVENT_READ)
            elif self._routes.pop(listener, None):
                self._paused.pop(listener, None)
                self._close_side(listener)

    def _end(self) -> None:
        for link in list(self._links):
            self._drop(link)
        self._follow_orders()
        for sock in (*self._routes, self._wake_read):
            sock.close()
        self._selector.close()

    def _check_deadlines(self) -> Optional[float]:
        """Drops connections that took too long; resumes paused listeners and dials again.

        Returns seconds until the next check.
        """
        current = time.monotonic()
        for links in (self._unproven, self._dialing):
            while links and next(iter(links)).deadline <= current:
                self._end_unproven(next(iter(links)))
        limit = current - PARTIAL_TIMEOUT_S
        while self._partial and next(iter(self._partial.values())) <= limit:
            self._check_partial(next(iter(self._partial)), current)
        for listener in [each for each, until in self._paused.items() if until <= current]:
            del self._paused[listener]
            self._selector.register(listener, selectors.EVENT_READ)
        redialing = [link for link in self._dialing if not link.outer]
        for link in redialing:
            if link.dial_at <= current:
                self._dial(link)
        due = [link.dial_at for link in redialing] + list(self._paused.values())
        due += [next(iter(links)).deadline for links in (self._unproven, self._dialing) if links]
        if self._partial:
            due.append(next(iter(self._partial.values())) + PARTIAL_TIMEOUT_S)
        return max(0.0, min(due) - current) if due else None

    def _accept(self, listener: socket.socket) -> None:
        route = self._routes[listener]
        try:
            accepted, caller = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._drop_oldest()
                self._selector.unregister(listener)
                self._paused[listener] = time.monotonic() + PAUSE_S
            return
        _prepare(accepted)
        try:
            peer_filters.detach_filter(accepted)
            has_access = route.is_gateway or _is_own_user(accepted)
        except OSError:  # too many open files
            has_access = False
        if not has_access:
            accepted.close()
            return
        is_caller = route.is_gateway or route.key is None
        inner, outer = (None, accepted) if is_caller else (accepted, None)
        host = str(caller[0]) if route.is_gateway else route.target[0]
        link = _Link(route, inner, outer, host)
        self._links[link] = None
        if route.key is None:
            self._selector.register(accepted, selectors.EVENT_READ, link)
            self._join(link, route.target)
        elif route.is_gateway:
            if len(self._unproven) >= _max_unproven():
                self._drop_oldest()
            self._unproven[link] = None
            self._begin(link)
        else:
            self._dialing[link] = None
            self._dial(link)

    def _dial(self, link: _Link) -> None:
        link.dial_at = time.monotonic() + REDIAL_S
        with contextlib.suppress(OSError):  # too many open files
            link.outer = _connect(link.route.target, link.route.port_filter)
            self._begin(link)

    def _begin(self, link: _Link) -> None:
        """Begins the proof on the side to the other host, in TLS if the job is encrypted."""
        assert link.outer is not None
        if self._encryption is None:
            self._selector.register(link.outer, selectors.EVENT_READ, link)
            self._begin_proof(link)
            return
        # who calls speaks first, as soon as it is connected
        events = selectors.EVENT_READ if link.route.is_gateway else selectors.EVENT_WRITE
        self._selector.register(link.outer, events, link)

    def _begin_proof(self, link: _Link, binding: str = "") -> None:
        route = link.route
        assert route.key is not None
        if route.is_gateway:
            link.handshake = listener_handshake(route.key, binding, route.request_length)
        else:
            link.handshake = caller_handshake(route.key, binding, route.request)
        self._send(link, *next(link.handshake))

    def _begin_tls(self, link: _Link) -> None:
        """Continues until both sides have agreed on keys; then begins the proof."""
        assert link.outer is not None
        assert self._encryption is not None
        if not self._encryption.has_begun(link.outer):
            link.outer.getpeername()  # OSError if it could not be connected
            self._selector.unregister(link.outer)
            link.outer = self._encryption.wrap(link.outer, link.route.is_gateway)
            self._selector.register(link.outer, selectors.EVENT_READ, link)
        tls: TlsSocket = link.outer  # type: ignore[assignment]
        tls.do_handshake()  # BlockingIOError while it waits for the other side
        self._partial.pop(link, None)
        self._begin_proof(link, self._encryption.binding(tls))

    def _send(self, link: _Link, text: str, answer_length: int) -> None:
        """Sends a short text, for which the socket has room."""
        link.missing, link.received = answer_length, b""
        if text and link.outer is not None:
            with contextlib.suppress(OSError):  # the next read fails, too
                link.outer.send(text.encode())

    def _handle(self, link: _Link, side: socket.socket, events: int) -> None:
        try:
            if link in self._unproven or link in self._dialing:
                self._prove(link)
                return
            if events & selectors.EVENT_WRITE:
                self._write(link, side, b"")
            if events & selectors.EVENT_READ and link in self._links:
                self._forward(link, side)
        except BlockingIOError:
            if events & selectors.EVENT_READ and self._is_encrypted(side):
                self._partial.setdefault(link, time.monotonic())
        except OSError as error:
            if self._encryption is not None and self._encryption.shows_change(error):
                self._report_change(link)
            self._fail(link)
        except Exception:  # wrong proofs, and whatever else: the others go on
            self._drop(link, is_altered=link in self._dialing)

    def _report_change(self, link: _Link) -> None:
        """Reports that bytes were changed on the way.

        Noise of a caller without the key says nothing about the network.
        """
        if self._encryption is not None and link not in self._unproven:
            self._encryption.on_altered(link.host)

    def _prove(self, link: _Link) -> None:
        assert link.outer is not None
        if link.handshake is None:
            self._begin_tls(link)
            return
        data = link.outer.recv(link.missing - len(link.received))
        if not data:
            raise ConnectionResetError
        self._partial.pop(link, None)
        link.received += data
        if len(link.received) < link.missing:
            return
        try:
            self._send(link, *link.handshake.send(link.received.decode("latin-1")))
        except StopIteration as done:
            text, request = done.value
            self._send(link, text, 0)
            self._join(link, *_requested(link.route, request))

    def _join(self, link: _Link, target: Address, source: str = "") -> None:
        """Forwards from now on what arrives on either side.

        A gateway connects to ``target`` from its address ``source``, if there is one.
        """
        self._unproven.pop(link, None)
        if link in self._dialing:
            del self._dialing[link]
            self._stalls.pop(link.host, None)
        if link.inner is None:
            try:
                link.inner = _connect(target, link.route.port_filter, source)
            except OSError:  # too many open files
                self._drop(link)
                return
        self._selector.register(link.inner, selectors.EVENT_READ, link)

    def _forward(self, link: _Link, side: socket.socket) -> None:
        (opposite,) = (candidate for candidate in link.sides if candidate is not side)
        data = side.recv(CHUNK_BYTES)
        if self._is_encrypted(side):
            self._watch_partial(link, side)
        if data:
            self._write(link, opposite, data)
            return
        link.ended = side
        if opposite not in link.unsent:
            self._drop(link)
            return
        self._selector.unregister(side)

    def _write(self, link: _Link, side: socket.socket, data: bytes) -> None:
        """Writes to one side; until all is written, nothing more is read from the opposite one."""
        former = link.unsent.pop(side, b"")
        unsent = former + data
        with contextlib.suppress(BlockingIOError):
            unsent = unsent[side.send(unsent) :]
        if unsent:
            link.unsent[side] = unsent
        if not unsent and link.ended not in (None, side):
            self._drop(link)
            return
        if bool(unsent) == bool(former):
            return
        for reader, writer in zip(link.sides, reversed(link.sides)):
            is_read = writer not in link.unsent and reader is not link.ended
            reads = selectors.EVENT_READ if is_read else 0
            writes = selectors.EVENT_WRITE if reader in link.unsent else 0
            self._watch(link, reader, reads | writes)
            if self._is_encrypted(reader):
                self._watch_partial(link, reader if is_read else None)

    def _watch(self, link: _Link, side: socket.socket, events: int) -> None:
        key = self._selector.get_map().get(side)
        if key is None and events:
            self._selector.register(side, events, link)
        elif key is not None and not events:
            self._selector.unregister(side)
        elif key is not None and key.events != events:
            self._selector.modify(side, events, link)

    def _is_encrypted(self, side: socket.socket) -> bool:
        return self._encryption is not None and self._encryption.has_begun(side)

    def _watch_partial(self, link: _Link, side: Optional[socket.socket]) -> None:
        """Limits the time for the rest of a record; ``side`` is ``None`` if it is not read now."""
        self._partial.pop(link, None)
        if side is not None and side.has_partial:  # type: ignore[attr-defined]
            self._partial[link] = time.monotonic()

    def _end_unproven(self, link: _Link) -> None:
        """Drops a link that took too long before its proof; the host may have been cut off."""
        num_stalls = 0
        if link in self._dialing:
            num_stalls = self._stalls.get(link.host, 0) + 1 if link in self._partial else 0
            self._stalls[link.host] = num_stalls
        self._drop(link, is_altered=num_stalls >= MIN_STALLS)

    def _check_partial(self, link: _Link, current: float) -> None:
        """Drops a link that misses a part of a record, unless the other host cannot be reached."""
        del self._partial[link]
        if link.outer is not None and _is_silent(link.outer):
            self._partial[link] = current + MAX_RETRY_S
        else:
            self._drop(link, is_altered=link.ended is None)

    def _fail(self, link: _Link) -> None:
        """Drops a connection that has ended; a forwarder that is not proven connects again."""
        if link not in self._dialing or link.outer is None:
            self._drop(link)
            return
        self._close_side(link.outer)
        self._partial.pop(link, None)
        link.handshake = None
        link.outer, link.dial_at = None, time.monotonic() + REDIAL_S

    def _drop_oldest(self) -> None:
        if self._unproven:
            self._drop(next(iter(self._unproven)))

    def _drop(self, link: _Link, *, is_altered: bool = False) -> None:
        if is_altered:
            self._report_change(link)
        self._partial.pop(link, None)
        self._unproven.pop(link, None)
        self._dialing.pop(link, None)
        del self._links[link]
        if link.inner is not None and link.route.port_filter is not None:
            link.route.port_filter.release(link.inner)
        for side in link.sides:
            self._close_side(side)

    def _close_side(self, side: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it is not watched, or closed
            self._selector.unregister(side)
        side.close()


def _max_unproven() -> int:
    limit: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(MAX_UNPROVEN, limit // UNPROVEN_SHARE) if limit > 0 else MAX_UNPROVEN


def _requested(route: Route, request: str) -> Tuple[Address, str]:
    """Returns where a gateway connects, and from which address: see ``tunnels.py``.

    Raises ValueError if the caller may not: from loopback, it must not reach other programs.
    """
    if not route.request_length:
        return route.target, ""
    source, host, number = struct.unpack("!4s4sH", bytes.fromhex(request))
    target = route.target[0], int(number)
    if host != socket.inet_aton(target[0]):
        raise ValueError("for another host: somebody in between has led it here")
    if source[:2] != host[:2]:
        raise ValueError("not an address of the job's ranks")
    if not socket_users.listens(target):
        raise ValueError("this user does not listen at this address")
    return target, socket.inet_ntoa(source)


def _connect(
    target: Address, port_filter: Optional[peer_filters.PortFilter] = None, source: str = ""
) -> socket.socket:
    """Begins to connect; if that fails, the first use of the socket raises."""
    sock = socket.socket(probe.family_of(target[0]), socket.SOCK_STREAM)
    try:
        _prepare(sock)
        if port_filter is not None and port_filter.is_attached:
            sock.bind((target[0], 0))
            port_filter.admit(sock)
        elif source:
            sock.bind((source, 0))
        sock.connect_ex(target)
    except OSError:
        sock.close()
        raise
    return sock


def _is_silent(connection: socket.socket) -> bool:
    """Whether the other host's kernel has not confirmed anything for a while."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_MS.size)
    is_known = len(info) == _LAST_ACK_MS.size
    return is_known and bool(_LAST_ACK_MS.unpack(info)[0] > 2000 * KEEPALIVE_S)


def _is_own_user(connection: socket.socket) -> bool:
    user = socket_users.peer_user(connection)
    return user in (os.getuid(), socket_users.UNKNOWN_USER)


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # the connection has ended
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MAX_KEEPALIVES)
