"""Send queues of the stream: urgent frames first, then the conversation, then files.

An :data:`URGENT` frame never waits. Large frames of the other lanes are cut into pieces, between
which higher lanes have their turn; on slow lines the pieces are compressed. A piece is a frame with
``part`` (its lane), ``more`` (whether another follows) and ``z`` (part of a zlib stream).
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any, Deque, Dict, Iterator, Optional, Tuple

from .congestion import PIECE_BYTES, CongestionWindow

Message = Dict[str, Any]
URGENT, TALK, FILES = range(3)
WHOLE_BYTES = 4 << 10  # bytes: longer words are no short ones, and a frame up to here goes whole
MAX_COMPRESSED_RATIO = 0.9  # of its size: what compresses to more is sent as it is


def lane_of(message: Message, size: int, blob: bytes) -> int:
    """Returns the lane for a frame of ``size`` bytes.

    Events keep their order, a rank's output before its end; an answer may overtake events.
    """
    if "event" in message:
        return TALK
    if blob:
        return FILES
    return URGENT if size <= WHOLE_BYTES else TALK


class QueuedFrame:
    """A frame in a lane, and how much of it was sent."""

    def __init__(self, frame: bytes) -> None:
        self.size = len(frame)
        self.frame = frame
        self._offset = 0
        self._compressor: Any = None  # a compressor, whose type has no name
        self._is_compressible = True
        self._ratio = 1.0

    @property
    def is_started(self) -> bool:
        return self._offset > 0

    @property
    def remaining(self) -> int:
        """Bytes not sent yet."""
        return self.size - self._offset

    def next_piece(self, size: int, compress: bool) -> Tuple[Message, bytes]:
        """Returns header and bytes of the next piece, about ``size`` bytes on the line."""
        num_bytes = max(size, min(PIECE_BYTES[1], int(size / self._ratio)))
        chunk = self.frame[self._offset : self._offset + num_bytes]
        self._offset += len(chunk)
        header: Message = {"more": self._offset < self.size}
        if self._compressor is None and not (compress and self._is_compressible):
            return header, chunk
        first = self._compressor is None
        if first:
            self._compressor = zlib.compressobj(1)
        data = self._compressor.compress(chunk)
        data += self._compressor.flush(zlib.Z_SYNC_FLUSH if header["more"] else zlib.Z_FINISH)
        self._ratio = max(0.1, len(data) / len(chunk))
        if first and self._ratio > MAX_COMPRESSED_RATIO:
            self._compressor, self._ratio, self._is_compressible = None, 1.0, False
            return header, chunk
        return dict(header, z=True), data


class SendQueues:
    """Frames that wait for room in the window."""

    def __init__(self) -> None:
        self._lanes: Dict[int, Deque[QueuedFrame]] = {TALK: deque(), FILES: deque()}
        self._size = {TALK: 0, FILES: 0}

    def add(self, lane: int, frame: bytes) -> QueuedFrame:
        """Appends a frame to its lane."""
        waiting = QueuedFrame(frame)
        self._lanes[lane].append(waiting)
        self._size[lane] += waiting.size
        return waiting

    def withdraw(self, waiting: QueuedFrame) -> bool:
        """Removes a frame that was not started; whether it could be removed."""
        for number, lane in self._lanes.items():
            if waiting in lane and not waiting.is_started:
                lane.remove(waiting)
                self._size[number] -= waiting.size
                return True
        return False

    def clear(self, *numbers: int) -> None:
        """Drops the frames of these lanes, or of all."""
        for number in numbers or (TALK, FILES):
            self._lanes[number].clear()
            self._size[number] = 0

    def __bool__(self) -> bool:
        return any(self._lanes.values())

    def size(self, lane: int) -> int:
        """Bytes that wait in a lane."""
        return self._size[lane]

    def next(self, window: CongestionWindow) -> Tuple[Optional[bytes], Message, bytes]:
        """Returns the next frame, or header and bytes of a piece. IndexError if all are empty."""
        number, lane = next(((n, lane) for n, lane in self._lanes.items() if lane), (0, None))
        if lane is None:
            raise IndexError("nothing waits")
        first = lane[0]
        if first.size <= WHOLE_BYTES:
            lane.popleft()
            self._size[number] -= first.size
            return first.frame, {}, b""
        remaining = first.remaining
        header, data = first.next_piece(window.piece, window.is_narrow)
        self._size[number] -= remaining - first.remaining
        if not header["more"]:
            lane.popleft()
        return None, dict(header, part=number), data


class Reassembler:
    """Joins pieces of at most ``PIECE_BYTES[1]`` to frames of at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: Dict[int, bytearray] = {}
        self._decompressors: Dict[int, Any] = {}

    def add(self, message: Message, data: bytes) -> Iterator[bytes]:
        """Takes a piece; yields the frame once it is complete. ValueError for invalid pieces."""
        lane = message["part"]
        if lane not in (TALK, FILES) or isinstance(lane, bool):
            raise ValueError("a piece of nothing")
        frame = self._frames.setdefault(lane, bytearray())
        if message.get("z"):
            data = self._decompress(lane, data)
        if len(data) > PIECE_BYTES[1]:
            raise ValueError("a piece of more than %d KiB" % (PIECE_BYTES[1] >> 10))
        frame += data
        if len(frame) > self._max_bytes:
            raise ValueError("a message of more than %d MiB" % (self._max_bytes >> 20))
        if not message.get("more"):
            del self._frames[lane]
            self._decompressors.pop(lane, None)
            yield bytes(frame)

    def _decompress(self, lane: int, data: bytes) -> bytes:
        try:
            decompressor = self._decompressors.setdefault(lane, zlib.decompressobj())
            chunk: bytes = decompressor.decompress(data, PIECE_BYTES[1] + 1)
        except zlib.error as error:
            raise ValueError("a piece that is damaged: %s" % error) from None
        return chunk
