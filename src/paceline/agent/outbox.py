"""Frames on their way to the launcher: bounded, never blocking the loop, safe from threads."""

from __future__ import annotations

import os
import threading
from typing import Optional

from .frames import MAX_ANSWER, Message, encode

HIGH_WATER = 8 * 1024 * 1024  # bytes after which the ranks' output is not read on


class Outbox:
    """A queue of encoded frames in front of a non-blocking descriptor.

    Attributes:
        broken: True after the reader has gone; further frames are dropped.
    """

    def __init__(self, fd: int, wake_fd: int) -> None:
        self.fd = fd
        self.broken = False
        self._wake_fd = wake_fd
        self._data = bytearray()
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Bytes not yet written."""
        return len(self._data)

    @property
    def full(self) -> bool:
        return self.pending > HIGH_WATER

    def post(self, message: Message, blob: bytes = b"") -> None:
        """Queues a frame; from any thread. ValueError when it is longer than a launcher takes."""
        frame = encode(message, blob, MAX_ANSWER)
        with self._lock:
            if not self.broken:
                self._data += frame
        self._wake()

    def flush(self) -> None:
        """Writes what the descriptor takes now."""
        with self._lock:
            while self._data and not self.broken:
                written = self._write(memoryview(self._data)[: 1 << 16])
                if written is None:
                    break
                del self._data[:written]

    def _write(self, chunk: memoryview) -> Optional[int]:
        with chunk:
            try:
                return os.write(self.fd, chunk)
            except BlockingIOError:
                return None
            except OSError:
                self.broken = True
                self._data = bytearray()
                return None

    def _wake(self) -> None:
        try:
            os.write(self._wake_fd, b"w")
        except BlockingIOError:
            pass  # a wake-up is already waiting
        except OSError:
            self.broken = True
