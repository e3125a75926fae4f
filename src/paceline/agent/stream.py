"""The agent's side of the connection to its launcher: it may break and continue on another.

Until reconnection is allowed the end of the stream ends the agent. Afterwards frames wait until the
launcher returns, for as long as the lease lasts. If the network breaks, all three streams end; if
the launcher ends the conversation or is killed, standard error still has a reader: no break.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Callable, List, Optional, Tuple

from .frames import ACK_BYTES, MAX_BLOB, MAX_JSON, Decoder, Message, Outbox
from .multiplexing import Reassembler
from .reconnection import ReconnectListener, Visit, has_reader

CHUNK_BYTES = 1 << 16
STDERR_GRACE_S = 0.5  # after the end of input or output: is standard error still read?
RECONNECT_TIMEOUT_S = 10.0  # to be met again, where no lease says how long
CLOSED_FD = -1
Requests = List[Tuple[Message, bytes]]


class Stream:
    """Requests in, frames out.

    Args:
        input_fd, output_fd: The first streams; the outbox writes to the latter.
        wake_fd: A byte written here wakes the loop.

    Attributes:
        outbox: Frames to the launcher.
        errors: Standard error, if it has the same peer as input and output.
        on_errors: Called with a new standard error's descriptor, which is closed afterwards.
        holder: Connection to the process that owns the streams: it stays until they end.
    """

    def __init__(self, input_fd: int, output_fd: int, wake_fd: int) -> None:
        self.outbox = Outbox(output_fd, wake_fd)
        self.errors: Optional[int] = None
        self.on_errors: Callable[[int], None] = lambda fd: None
        self.holder: Optional[socket.socket] = None
        self._input: Optional[int] = input_fd
        self._decoder = Decoder()
        self._joiner = Reassembler(MAX_JSON + MAX_BLOB)
        self._unacked_bytes = 0  # bytes heard since we said so
        self._place: Optional[ReconnectListener] = None
        self._ended_at: Optional[float] = None
        self._disconnected_at: Optional[float] = None

    def allow_reconnect(self, key: bytes) -> str:
        """Makes breaks recoverable; returns the socket's name. OSError if impossible."""
        if self._place is not None:
            self._place.close()
        self._place = ReconnectListener(key)
        self.outbox.retains = True
        return self._place.name

    def readers(self) -> List[int]:
        """Descriptors to watch."""
        fds = [] if self._input is None or self._ended_at is not None else [self._input]
        return fds + (self._place.readers() if self._place is not None else [])

    def readable(self, fd: int) -> Optional[Requests]:
        """Reads from one of :meth:`readers`; returns requests, ``None`` if it is not ours."""
        if fd == self._input:
            return self._read(fd)
        if self._place is None or fd not in self._place.readers():
            return None
        visit = self._place.readable(fd, self.outbox.num_received)
        if visit is not None and self.outbox.has_sent(visit.num_received):
            self._resume(visit)
        elif visit is not None:  # it has the key, and still is none that we talk with
            visit.streams.close()
            visit.holder.close()
        return []

    def _read(self, fd: int) -> Requests:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._ended_at = time.monotonic()
        requests: Requests = []
        self._unacked_bytes += len(data)
        for message, blob in self._decoder.feed(data):
            self.outbox.num_received += 1
            with contextlib.suppress(ValueError):  # a launcher knows what it says
                self.outbox.acknowledge(message.pop("heard", 0))
            if "part" in message:  # the next one waits until this one was heard
                self._unacked_bytes += ACK_BYTES
                for frame in self._joiner.add(message, blob):
                    requests += Decoder().feed(frame)
            elif message:  # else that was all there was to say
                requests.append((message, blob))
        if self._unacked_bytes > ACK_BYTES:
            self._unacked_bytes = 0
            self.outbox.post({})  # with what every frame tells
        return requests

    def _resume(self, visit: Visit) -> None:
        self.release()
        self._input, self._decoder = visit.streams.input, Decoder()
        self._ended_at = self._disconnected_at = None
        self.holder = visit.holder
        self.on_errors(visit.streams.errors)
        os.close(visit.streams.errors)
        self.outbox.resume(visit.streams.output, visit.num_received)

    def release(self) -> None:
        """Closes the current streams, which ends the login that brought them."""
        if self._input is not None:
            for fd in (self._input, self.outbox.fd):
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._input, self.outbox.fd = None, CLOSED_FD
        if self.holder is not None:
            self.holder.close()
            self.holder = None

    def end_reason(self, leased: bool) -> Optional[Tuple[str, str]]:
        """Why the stream's state ends the agent, as a word and a sentence; ``None`` if it does not.

        ``leased``: a lease limits the wait for the launcher.
        """
        now = time.monotonic()
        if self._ended_at is None and self.outbox.broken:
            self._ended_at = now
        if self._ended_at is None:
            return None
        errors = self.outbox.fd if self.errors is None else self.errors
        can_return = self._place is not None and self._disconnected_at is None
        if can_return and not has_reader(errors):
            self._disconnected_at = now
            self.outbox.disconnect()
            self.release()
        if self._disconnected_at is None:
            is_early = self._place is not None and now - self._ended_at < STDERR_GRACE_S
            return None if is_early else ("launcher", "the launcher went away")
        if not leased and now - self._disconnected_at > RECONNECT_TIMEOUT_S:
            return "broken", "the connection to the launcher broke, and it did not come again"
        return None

    def close(self) -> None:
        """Closes the socket; the streams end with the process."""
        if self._place is not None:
            self._place.close()
