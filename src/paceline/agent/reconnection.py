"""Where an agent is met again after its stream broke, though both ends live.

The launcher has the node run ``again.py``, which connects to a socket of this agent and hands over
its standard streams: they are the agent's new ones. Before, launcher and agent prove to each other
that they know the key of this connection, which the launcher made and told over the first stream.

The socket has an abstract name: nothing of it is left, whoever is killed. Such a name has no
permissions, so the kernel's word on who connects is heard instead (``SO_PEERCRED``): another user
is hung up on before anything else. In what follows ``mac`` is HMAC-SHA256 under the key; NONCE and
OTHER are fresh on each side, the counts say how many frames each has heard so far::

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
PATIENCE_S = 5.0  # for somebody to prove who it is
AT_ONCE = 8  # who may be proving it; beyond that the oldest goes
LONGEST = 256  # bytes of the launcher's line
NONCE_BYTES = 16
MOST_DIGITS = 15
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


class Met(NamedTuple):
    """A launcher that has proven itself.

    Attributes:
        streams: The new ones.
        heard: How many of our frames it has heard.
        holder: Connection to the process whose streams they were; it stays until this is closed.
    """

    streams: Streams
    heard: int
    holder: socket.socket


class _Visitor:
    """Somebody who connected, on its way to a proof."""

    def __init__(self, holder: socket.socket) -> None:
        self.holder = holder
        self.since = time.monotonic()
        self.nonce = os.urandom(NONCE_BYTES).hex()
        self.streams: Optional[Streams] = None
        self.line = b""

    @property
    def fd(self) -> int:
        """What it is heard by: its socket, and then the input that came through it."""
        return self.holder.fileno() if self.streams is None else self.streams.input

    def close_control(self) -> None:
        if self.streams is not None:
            self.streams.close()
        self.holder.close()


class Place:
    """Where this agent can be met.

    Args:
        key: What only the launcher and this agent know.
        name: Of the socket, without the leading zero byte; a fresh one without.
    """

    def __init__(self, key: bytes, name: str = "") -> None:
        self.name = name or "paceline-" + os.urandom(NONCE_BYTES).hex()
        self._key = key
        self._visitors: List[_Visitor] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind("\0" + self.name)
        self._listener.listen(AT_ONCE)

    def readers(self) -> List[int]:
        """Descriptors to watch; who took too long is hung up on."""
        late = time.monotonic() - PATIENCE_S
        for visitor in [one for one in self._visitors if one.since < late]:
            self._dismiss(visitor)
        return [self._listener.fileno(), *(visitor.fd for visitor in self._visitors)]

    def readable(self, fd: int, heard: int) -> Optional[Met]:
        """Reads from one of :meth:`readers`; whom we have met, if it is somebody now.

        Args:
            fd: Which.
            heard: How many of the launcher's frames we have heard.
        """
        if fd == self._listener.fileno():
            self._accept()
            return None
        visitor = next((one for one in self._visitors if one.fd == fd), None)
        if visitor is None:
            return None
        try:
            return self._hear(visitor, heard)
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            self._dismiss(visitor)
            return None

    def _accept(self) -> None:
        try:
            holder, _ = self._listener.accept()
        except OSError:
            return
        holder.setblocking(False)
        if uid_of(holder) != os.getuid():
            holder.close()
            return
        if len(self._visitors) >= AT_ONCE:
            self._dismiss(self._visitors[0])
        self._visitors.append(_Visitor(holder))

    def _dismiss(self, visitor: _Visitor) -> None:
        self._visitors.remove(visitor)
        visitor.close_control()

    def _hear(self, visitor: _Visitor, heard: int) -> Optional[Met]:
        if visitor.streams is None:
            self._take_streams(visitor)
            return None
        data = os.read(visitor.streams.input, LONGEST)
        visitor.line += data
        if not data or len(visitor.line) >= LONGEST:
            raise ValueError("no proof")
        if not visitor.line.endswith(b"\n"):
            return None
        other, count, proof = visitor.line.decode("ascii").split()
        expected = mac(self._key, "launcher", visitor.nonce, other, count)
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            _tell(visitor.streams, "stranger")
            raise ValueError("wrong key")
        if not count.isdigit() or len(count) > MOST_DIGITS:
            raise ValueError("no count")
        ours = mac(self._key, "agent", other, visitor.nonce, str(heard))
        _tell(visitor.streams, "again %d %s" % (heard, ours))
        self._visitors.remove(visitor)
        return Met(visitor.streams, int(count), visitor.holder)

    def _take_streams(self, visitor: _Visitor) -> None:
        _, fds, _, _ = socket.recv_fds(visitor.holder, 1, len(Streams._fields))
        if len(fds) != len(Streams._fields):
            for fd in fds:
                os.close(fd)
            raise ValueError("no streams")
        visitor.streams = Streams(*fds)
        for fd in fds:
            os.set_blocking(fd, False)
        _tell(visitor.streams, "meet " + visitor.nonce)

    def close(self) -> None:
        for visitor in self._visitors:
            visitor.close_control()
        self._visitors = []
        self._listener.close()


def _tell(streams: Streams, words: str) -> None:
    """One short line, the first on its pipe: it goes out whole or not at all."""
    os.write(streams.output, MARK + words.encode() + b"\n")


def mac(key: bytes, *words: str) -> str:
    """Proof of the key over some words; ``caller.py`` has its own, because it travels alone."""
    return hmac.new(key, "\0".join(words).encode(), hashlib.sha256).hexdigest()


def uid_of(connection: socket.socket) -> int:
    """Who is at the other end of a Unix socket, by the kernel's word."""
    size = _CREDENTIALS.size
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(found)[1])


def is_read(fd: int) -> bool:
    """Whether somebody can still read what is written to ``fd``."""
    poll = select.poll()
    poll.register(fd, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
