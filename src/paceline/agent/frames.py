"""The framed stream between launcher and agent.

A frame is ``MAGIC``, two big-endian 32-bit lengths, a JSON object (UTF-8) and raw bytes::

    4 bytes MAGIC | u32 length of JSON | u32 length of blob | JSON | blob

Whatever stands outside a frame (login banners, noise of shell start-up files) is kept apart and
never read as data.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, List, Optional, Tuple

MAGIC = b"\xf5PL1"
_HEADER = struct.Struct(">4sII")
MAX_JSON = 64 * 1024 * 1024
MAX_BLOB = 64 * 1024 * 1024

Message = Dict[str, Any]


def encode(message: Message, blob: bytes = b"") -> bytes:
    """One frame. ``message`` must be JSON; lone surrogates (undecodable bytes) survive."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _HEADER.pack(MAGIC, len(body), len(blob)) + body + blob


def _parse(body: bytearray) -> Optional[Message]:
    """The JSON object of a frame; ``None`` when it is none, so that it was no frame."""
    try:
        message = json.loads(body)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


class Decoder:
    """Takes bytes as they arrive, gives whole frames.

    Attributes:
        noise: Bytes that stood outside frames, at most ``keep_noise`` of them.
    """

    def __init__(self, keep_noise: int = 8192) -> None:
        self._buffer = bytearray()
        self._keep = keep_noise
        self.noise = bytearray()

    def feed(self, data: bytes) -> List[Tuple[Message, bytes]]:
        """Adds ``data``; returns the frames that are now whole, in order."""
        self._buffer += data
        frames: List[Tuple[Message, bytes]] = []
        while True:
            self._skip_noise()
            if len(self._buffer) < _HEADER.size:
                return frames
            magic, body_length, blob_length = _HEADER.unpack_from(self._buffer)
            if body_length > MAX_JSON or blob_length > MAX_BLOB:
                self._drop(len(MAGIC))  # not a frame after all: look for the next one
                continue
            end = _HEADER.size + body_length + blob_length
            if len(self._buffer) < end:
                return frames
            message = _parse(self._buffer[_HEADER.size : _HEADER.size + body_length])
            if message is None:
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
        self.noise += self._buffer[:count]
        del self.noise[: -self._keep]
        del self._buffer[:count]
