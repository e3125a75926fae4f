"""Calls at this rank's own listening sockets: from the job's hosts, many at once, bounded in time.

Until it has sent its whole greeting, a caller only takes one of :data:`MAX_CALLERS` places, so a
slow or silent caller does not delay others. Both sides prove a key before anything else is read.
``mac`` is HMAC-SHA256; the key of the connection also contains what it is for::

    called: NONCE
    caller: OTHER CONTENT mac(connection "caller" CONTENT)
    called: mac(connection "called" CONTENT)               connection: mac(key PURPOSE OTHER NONCE)
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import secrets
import selectors
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from paceline.agent.ranks import peer_filters
from paceline.agent.ranks.peer_filters import job_hosts as job_hosts
from paceline.spec import jobenv

MAX_CALLERS = 64
"""Callers whose greetings are waited for at once; one more takes the place of the oldest."""

NONCE_BYTES, PROOF_BYTES = 16, 32


@dataclass(slots=True)
class Caller:
    """A connection whose greeting is awaited.

    Attributes:
        connection: Blocking, and owned by the taker, as soon as :func:`greetings` yields it.
        nonce: What it was sent first.
        greeting: What has come of it.
        deadline: Of the whole greeting, on the monotonic clock.
    """

    connection: socket.socket
    nonce: bytes
    deadline: float
    greeting: bytearray = field(default_factory=bytearray)


_reported: set[str] = set()


def _report(address: str) -> None:
    """Tells the launcher of an address that is not the job's, once."""
    descriptor = os.environ.get(jobenv.EVENT_FD, "")
    if descriptor.isdecimal() and address not in _reported:
        _reported.add(address)
        event = {"kind": "event", "event": "stranger refused", "address": address}
        with contextlib.suppress(OSError):
            os.write(int(descriptor), json.dumps(event).encode() + b"\n")


_rejects = peer_filters.RejectWatcher(_report)


def guard(listener: socket.socket) -> peer_filters.PeerFilter | None:
    """Has the kernel keep all but the job's hosts from a listening socket.

    ``None`` when the hosts are not known.
    """
    hosts = job_hosts()
    if hosts is None:
        return None
    peer_filter = peer_filters.PeerFilter(listener, hosts)
    _rejects.watch(peer_filter, listener.fileno())
    return peer_filter


def greetings(
    listener: socket.socket,
    content_bytes: int,
    limit_s: float,
    *,
    until: float = math.inf,
) -> Generator[Caller, None, None]:
    """Each caller that sends its whole greeting in time; all others are closed.

    Args:
        content_bytes: Bytes of a greeting between nonce and proof.
        limit_s: For one, from the call on.
        until: When all of them have to have come, on the monotonic clock.

    Raises:
        TimeoutError: It is ``until``.
        OSError: The listening socket has ended.
    """
    listener.setblocking(False)
    size = NONCE_BYTES + content_bytes + PROOF_BYTES
    waiting: dict[int, Caller] = {}  # oldest first
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def release(caller: Caller, *, close: bool = True) -> None:
            selector.unregister(caller.connection)
            del waiting[caller.connection.fileno()]
            if close:
                caller.connection.close()

        try:
            while (current := time.monotonic()) < until:
                for caller in [each for each in waiting.values() if each.deadline <= current]:
                    release(caller)
                deadline = min([until, *(each.deadline for each in waiting.values())])
                for key, _ in selector.select(None if deadline == math.inf else deadline - current):
                    existing = waiting.get(key.fd)
                    if existing is not None:
                        if _read(existing, size):
                            is_complete = len(existing.greeting) == size
                            release(existing, close=not is_complete)
                            if is_complete:
                                existing.connection.setblocking(True)
                                yield existing
                    elif (visitor := _accept(listener, limit_s)) is not None:
                        if len(waiting) >= MAX_CALLERS:
                            release(next(iter(waiting.values())))
                        waiting[visitor.connection.fileno()] = visitor
                        selector.register(visitor.connection, selectors.EVENT_READ)
        finally:
            for caller in waiting.values():
                caller.connection.close()
    raise TimeoutError("not all have called in time")


def _accept(listener: socket.socket, limit_s: float) -> Caller | None:
    try:
        connection, (address, *_) = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    peer_filters.detach_filter(connection)
    hosts = job_hosts()
    if hosts is not None and address not in hosts:  # the kernel does not keep it away
        _report(str(peer_filters.parse_address(address)))
        connection.close()
        return None
    connection.setblocking(False)
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        connection.send(nonce)
    except OSError:
        connection.close()
        return None
    return Caller(connection, nonce, time.monotonic() + limit_s)


def _read(caller: Caller, size: int) -> bool:
    """Takes what has come; returns whether nothing more is expected."""
    try:
        part = caller.connection.recv(size - len(caller.greeting))
    except BlockingIOError:
        return False
    except OSError:
        part = b""
    caller.greeting += part
    return not part or len(caller.greeting) == size


def read_exactly(connection: socket.socket, size: int, until: float) -> bytes:
    """Reads ``size`` bytes by the time ``until`` on the monotonic clock.

    Raises:
        OSError: They do not come in time, or the connection ends.
    """
    parts = []
    while size:
        connection.settimeout(max(0.01, until - time.monotonic()))
        part = connection.recv(min(size, 1 << 18))
        if not part:
            raise ConnectionResetError("the connection has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# -- proofs ----------------------------------------------------------------------------------


def prove(
    connection: socket.socket, key: bytes, purpose: bytes, until: float, content: bytes = b""
) -> bytes:
    """Proves the key to the side that was called; returns the key of this connection.

    The other side has not proven anything before :func:`check_reply`.

    Args:
        purpose: Of the connection, the same on both sides.
        until: On the monotonic clock.
        content: Sent along and proven, too.

    Raises:
        OSError: The connection ends, or no nonce comes in time.
    """
    peer_nonce = read_exactly(connection, NONCE_BYTES, until)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection_key = _mac(key, purpose, nonce, peer_nonce)
    connection.sendall(nonce + content + _mac(connection_key, b"caller", content))
    return connection_key


def check_reply(
    connection: socket.socket, connection_key: bytes, until: float, content: bytes = b""
) -> None:
    """Waits for the proof of the side that was called.

    Raises:
        OSError: It does not know the key, or sends no proof in time.
    """
    proof = read_exactly(connection, PROOF_BYTES, until)
    if not hmac.compare_digest(proof, _mac(connection_key, b"called", content)):
        raise ConnectionError("a process without the key answers there")


def verify(caller: Caller, key: bytes, purpose: bytes) -> tuple[bytes, bytes] | None:
    """Returns the key of a caller's connection and the content of its greeting.

    ``None`` if the caller does not know the key. Sends nothing; :func:`reply` does.
    """
    greeting = bytes(caller.greeting)
    nonce, content = greeting[:NONCE_BYTES], greeting[NONCE_BYTES:-PROOF_BYTES]
    connection_key = _mac(key, purpose, nonce, caller.nonce)
    expected = _mac(connection_key, b"caller", content)
    if not hmac.compare_digest(greeting[-PROOF_BYTES:], expected):
        return None
    return connection_key, content


def reply(connection: socket.socket, connection_key: bytes, content: bytes = b"") -> None:
    """Proves the key to a caller that has proven it. May raise OSError."""
    connection.sendall(_mac(connection_key, b"called", content))


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), "sha256")
