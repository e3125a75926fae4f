"""The framed stream between launcher and agent.

A frame is ``MAGIC``, two big-endian 32-bit lengths, a JSON object (UTF-8) and raw bytes::

    4 bytes MAGIC | u32 length of JSON | u32 length of blob | JSON | blob

Whatever stands outside a frame (login banners, noise of shell start-up files) is kept apart and
never read as data. What an agent says waits in its :class:`Outbox`.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from typing import Any, Dict, List, Optional, Tuple

MAGIC = b"\xf5PL1"
_HEADER = struct.Struct(">4sII")
MAX_JSON = 64 * 1024 * 1024  # bytes
MAX_BLOB = 64 * 1024 * 1024
MAX_ANSWER = 12 * 1024 * 1024  # of JSON from a node: parsed, it may take twenty times as much
MAX_ANSWER_BLOB = 2 * 1024 * 1024
MOST_DIGITS = 20  # of a whole number
MOST_WASTED = 64 * 1024 * 1024  # bytes of what looked like frames and was none
HIGH_WATER = 8 * 1024 * 1024  # bytes after which the ranks' output is not read on

Message = Dict[str, Any]


class FrameError(ValueError):
    """So much that looks like frames and is none cannot be an accident."""


def encode(message: Message, blob: bytes = b"", most: int = MAX_JSON) -> bytes:
    """One frame. ``message`` must be JSON; lone surrogates (undecodable bytes) survive.

    ValueError when the JSON is longer than ``most`` bytes.
    """
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > most:
        raise ValueError("a message of %d MiB is too long" % (len(body) >> 20))
    return _HEADER.pack(MAGIC, len(body), len(blob)) + body + blob


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError("a number of %d digits" % len(digits))
    return int(digits)


_JSON = json.JSONDecoder(parse_int=_whole)


def _parse(body: bytearray) -> Optional[Message]:
    """The JSON object of a frame; ``None`` when it is none, so that it was no frame."""
    try:
        message = _JSON.decode(body.decode())
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


class Decoder:
    """Takes bytes as they arrive, gives whole frames.

    Args:
        keep_noise: How many bytes of noise are kept.
        max_json, max_blob: Bytes above which it is no frame.

    Attributes:
        noise: Bytes that stood outside frames, at most ``keep_noise`` of them.
    """

    def __init__(self, keep_noise: int = 8192, max_json: int = MAX_JSON,
                 max_blob: int = MAX_BLOB) -> None:  # fmt: skip
        self._buffer = bytearray()
        self._keep = keep_noise
        self._max_json, self._max_blob = max_json, max_blob
        self._wasted = 0
        self.noise = bytearray()

    @property
    def halfway(self) -> bool:
        """True while a frame has begun and not ended."""
        return self._buffer.startswith(MAGIC)

    def feed(self, data: bytes) -> List[Tuple[Message, bytes]]:
        """Adds ``data``; returns the frames that are now whole, in order.

        FrameError when too much looked like frames and was none.
        """
        self._buffer += data
        frames: List[Tuple[Message, bytes]] = []
        while True:
            self._skip_noise()
            if len(self._buffer) < _HEADER.size:
                return frames
            magic, body_length, blob_length = _HEADER.unpack_from(self._buffer)
            too_long = body_length > self._max_json or blob_length > self._max_blob
            first = bytes(self._buffer[_HEADER.size : _HEADER.size + 1])
            if too_long or first not in (b"", b"{"):
                self._drop(len(MAGIC))  # not a frame after all: look for the next one
                continue
            end = _HEADER.size + body_length + blob_length
            if len(self._buffer) < end:
                return frames
            message = _parse(self._buffer[_HEADER.size : _HEADER.size + body_length])
            if message is None:
                self._wasted += end
                if self._wasted > MOST_WASTED:
                    raise FrameError("%d MiB of broken messages" % (self._wasted >> 20))
                self._drop(len(MAGIC))
                continue
            frames.append((message, bytes(self._buffer[_HEADER.size + body_length : end])))
            del self._buffer[:end]

    def _skip_noise(self) -> None:
        at = self._buffer.find(MAGIC)
        if at > 0:
            self._drop(at)
        elif at < 0 and len(self._buffer) >= len(MAGIC):
            # the last bytes may be the beginning of a magic that is still arriving
            self._drop(len(self._buffer) - len(MAGIC) + 1)

    def _drop(self, count: int) -> None:
        self.take_noise(bytes(self._buffer[:count]))
        del self._buffer[:count]

    def take_noise(self, data: bytes) -> None:
        """Keeps the last of what is no frame."""
        self.noise += data[-self._keep :]
        del self.noise[: -self._keep]


class Outbox:
    """Frames on their way to the launcher: bounded, never blocking the loop, safe from threads.

    A queue of encoded frames in front of a non-blocking descriptor.

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
