"""Lets the launcher reach a living agent again after its stream broke.

The launcher has the node run ``reattach.py``, which connects to a Unix socket of this agent and
hands over its standard streams. Both sides then prove that they know the key of the connection.
The socket has an abstract name, so no file remains; the kernel's ``SO_PEERCRED`` keeps other users
out. ``mac`` is HMAC-SHA256 under the key; the counts say how many frames each has received::

    agent:    MARK meet NONCE
    launcher: OTHER COUNT mac("launcher" NONCE OTHER COUNT)
    agent:    MARK again COUNT mac("agent" OTHER NONCE COUNT)       or     MARK stranger
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import time
from typing import List, NamedTuple, Optional

MARK = b"\xf5PLboot "
PROOF_TIMEOUT_S = 5.0  # for somebody to prove who it is
MAX_VISITORS = 8  # who may be proving it; beyond that the oldest goes
MAX_LINE_BYTES = 256  # bytes of the launcher's line
NONCE_BYTES = 16
MAX_DIGITS = 15
_CREDENTIALS = struct.Struct("3i")


class Streams(NamedTuple):
    """What an agent talks by: descriptors for input, output and standard error."""

    input: int
    output: int
    errors: int

    def close(self) -> None:
        for fd in self:
            with contextlib.suppress(OSError):
                os.close(fd)


class Visit(NamedTuple):
    """A launcher that has proven the key.

    Attributes:
        streams: The new standard streams.
        num_received: How many of the agent's frames it has received.
        holder: Connection to the process that owned the streams; it stays until this is closed.
    """

    streams: Streams
    num_received: int
    holder: socket.socket


class _Visitor:
    """A connection that has not proven the key yet."""

    def __init__(self, holder: socket.socket) -> None:
        self.holder = holder  # to the process that owned the streams
        self.connected_at = time.monotonic()
        self.nonce = os.urandom(NONCE_BYTES).hex()
        self.streams: Optional[Streams] = None
        self.line = b""  # what has come of the launcher's proof

    @property
    def fd(self) -> int:
        """The descriptor to watch: the socket, then the input that came through it."""
        return self.holder.fileno() if self.streams is None else self.streams.input

    def close(self) -> None:
        if self.streams is not None:
            self.streams.close()
        self.holder.close()


class ReconnectListener:
    """The socket at which this agent can be reached again.

    Args:
        key: Shared by the launcher and this agent.
        name: Of the socket, without the leading zero byte; random if empty.
    """

    def __init__(self, key: bytes, name: str = "") -> None:
        self.name = name or "paceline-" + os.urandom(NONCE_BYTES).hex()
        self._key = key
        self._visitors: List[_Visitor] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind("\0" + self.name)
        self._listener.listen(MAX_VISITORS)

    def readers(self) -> List[int]:
        """Returns the descriptors to watch; closes visitors that took too long."""
        oldest = time.monotonic() - PROOF_TIMEOUT_S
        for visitor in [v for v in self._visitors if v.connected_at < oldest]:
            self._dismiss(visitor)
        return [self._listener.fileno(), *(visitor.fd for visitor in self._visitors)]

    def readable(self, fd: int, num_received: int) -> Optional[Visit]:
        """Reads from one of :meth:`readers`; returns the launcher once it has proven the key.

        ``num_received``: how many of the launcher's frames the agent has received.
        """
        if fd == self._listener.fileno():
            self._accept()
            return None
        visitor = next((candidate for candidate in self._visitors if candidate.fd == fd), None)
        if visitor is None:
            return None
        try:
            return self._verify(visitor, num_received)
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._dismiss(visitor)
        return None

    def _accept(self) -> None:
        try:
            holder, _ = self._listener.accept()
        except OSError:
            return
        holder.setblocking(False)
        if peer_uid(holder) != os.getuid():
            holder.close()
            return
        if len(self._visitors) >= MAX_VISITORS:
            self._dismiss(self._visitors[0])
        self._visitors.append(_Visitor(holder))

    def _dismiss(self, visitor: _Visitor) -> None:
        self._visitors.remove(visitor)
        visitor.close()

    def _verify(self, visitor: _Visitor, num_received: int) -> Optional[Visit]:
        if visitor.streams is None:
            self._receive_streams(visitor)
            return None
        data = os.read(visitor.streams.input, MAX_LINE_BYTES)
        visitor.line += data
        if not data or len(visitor.line) >= MAX_LINE_BYTES:
            raise ValueError("no proof")
        if not visitor.line.endswith(b"\n"):
            return None
        peer_nonce, count, proof = visitor.line.decode("ascii").split()
        expected = mac(self._key, "launcher", visitor.nonce, peer_nonce, count)
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            _write_line(visitor.streams, "stranger")
            raise ValueError("wrong key")
        if not count.isdigit() or len(count) > MAX_DIGITS:
            raise ValueError("no count")
        own_proof = mac(self._key, "agent", peer_nonce, visitor.nonce, str(num_received))
        _write_line(visitor.streams, "again %d %s" % (num_received, own_proof))
        self._visitors.remove(visitor)
        return Visit(visitor.streams, int(count), visitor.holder)

    def _receive_streams(self, visitor: _Visitor) -> None:
        _, fds, _, _ = socket.recv_fds(visitor.holder, 1, len(Streams._fields))
        if len(fds) != len(Streams._fields):
            for fd in fds:
                os.close(fd)
            raise ValueError("no streams")
        visitor.streams = Streams(*fds)
        for fd in fds:
            os.set_blocking(fd, False)
        _write_line(visitor.streams, "meet " + visitor.nonce)

    def close(self) -> None:
        for visitor in self._visitors:
            visitor.close()
        self._visitors = []
        self._listener.close()


def _write_line(streams: Streams, text: str) -> None:
    """Writes a short line, the first on its pipe: it is written whole or not at all."""
    os.write(streams.output, MARK + text.encode() + b"\n")


def mac(key: bytes, *parts: str) -> str:
    """Returns the proof of the key over some texts; ``caller.py`` travels alone and has its own."""
    return hmac.new(key, "\0".join(parts).encode(), hashlib.sha256).hexdigest()


def connect(name: str, timeout_s: float) -> socket.socket:
    """Connects to an abstract Unix socket; its operations time out after ``timeout_s``.

    Any user may connect and fill the listener's queue. A non-blocking ``connect`` then fails at
    once; this one waits for room. ``reattach.py`` travels alone and has its own.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.connect("\0" + name)
        connection.settimeout(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def peer_uid(connection: socket.socket) -> int:
    """Returns the user at the other end of a Unix socket, from the kernel."""
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def has_reader(fd: int) -> bool:
    """Whether some process can still read what is written to ``fd``."""
    poll = select.poll()
    poll.register(fd, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
