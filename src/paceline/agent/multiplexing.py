"""What waits to be sent: short words first, then the rest of the conversation, then files.

Each has a lane. What is in :data:`AT_ONCE` never waits. In the others a frame begins when all that
came before it into its lane have gone. It goes in pieces, between which the lanes before its own
have their turn. On a line that is known to be slow the pieces are compressed.

A piece is a frame of its own: ``part`` is its lane, ``more`` says whether another one follows, and
``z`` that it belongs to the frame's zlib stream, which may begin in the midst of it.
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
    """The lane for a frame of ``size`` bytes.

    What happens on a node is heard in order, a rank's last words before its end; an answer may come
    before what happened earlier.
    """
    if "event" in message:
        return TALK
    if blob:
        return FILES
    return URGENT if size <= WHOLE_BYTES else TALK


class QueuedFrame:
    """A frame in a lane, and how much of it has gone."""

    def __init__(self, frame: bytes) -> None:
        self.size = len(frame)
        self._frame = frame
        self._offset = 0
        self._compressor: Any = None  # a compressor, whose type has no name
        self._is_compressible = True
        self._ratio = 1.0

    @property
    def is_started(self) -> bool:
        return self._offset > 0

    @property
    def remaining(self) -> int:
        """Bytes that have not gone."""
        return self.size - self._offset

    def as_whole(self) -> Optional[bytes]:
        """All of it, where it needs no pieces."""
        return self._frame if self.size <= WHOLE_BYTES and not self.is_started else None

    def next_piece(self, size: int, compress: bool) -> Tuple[Message, bytes]:
        """The next piece, of about so many bytes on the line."""
        num_bytes = max(size, min(PIECE_BYTES[1], int(size / self._ratio)))
        chunk = self._frame[self._offset : self._offset + num_bytes]
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
    """The frames that wait for room on the line."""

    def __init__(self) -> None:
        self._lanes: Dict[int, Deque[QueuedFrame]] = {TALK: deque(), FILES: deque()}
        self._size = {TALK: 0, FILES: 0}

    def add(self, lane: int, frame: bytes) -> QueuedFrame:
        """Puts a frame at the end of its lane."""
        waiting = QueuedFrame(frame)
        self._lanes[lane].append(waiting)
        self._size[lane] += waiting.size
        return waiting

    def withdraw(self, waiting: QueuedFrame) -> bool:
        """Nobody needs it any more; whether it was not too late for that."""
        for number, lane in self._lanes.items():
            if waiting in lane and not waiting.is_started:
                lane.remove(waiting)
                self._size[number] -= waiting.size
                return True
        return False

    def clear(self, *numbers: int) -> None:
        """Forgets what waits in these lanes, or in all."""
        for number in numbers or (TALK, FILES):
            self._lanes[number].clear()
            self._size[number] = 0

    def __bool__(self) -> bool:
        return any(self._lanes.values())

    def size(self, lane: int) -> int:
        """Bytes that wait in a lane."""
        return self._size[lane]

    def next(self, window: CongestionWindow) -> Tuple[Optional[bytes], Message, bytes]:
        """What goes next: a whole frame, or a piece as the frame that it becomes.

        IndexError when nothing waits.
        """
        number, lane = next(((n, lane) for n, lane in self._lanes.items() if lane), (0, None))
        if lane is None:
            raise IndexError("nothing waits")
        first = lane[0]
        frame = first.as_whole()
        if frame is not None:
            lane.popleft()
            self._size[number] -= first.size
            return frame, {}, b""
        remaining = first.remaining
        header, data = first.next_piece(window.piece, window.is_narrow)
        self._size[number] -= remaining - first.remaining
        if not header["more"]:
            lane.popleft()
        return None, dict(header, part=number), data


class Reassembler:
    """Puts pieces together again.

    Args:
        most: Bytes of a frame, at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: Dict[int, bytearray] = {}
        self._decompressors: Dict[int, Any] = {}

    def add(self, message: Message, data: bytes) -> Iterator[bytes]:
        """The next piece; gives the frame once it is whole. ValueError for what is no piece."""
        lane = message["part"]
        if lane not in (TALK, FILES) or isinstance(lane, bool):
            raise ValueError("a piece of nothing")
        frame = self._frames.setdefault(lane, bytearray())
        if message.get("z"):
            data = self._decompress(lane, data, self._max_bytes - len(frame))
        frame += data
        if len(frame) > self._max_bytes:
            raise ValueError("a message of more than %d MiB" % (self._max_bytes >> 20))
        if not message.get("more"):
            del self._frames[lane]
            self._decompressors.pop(lane, None)
            yield bytes(frame)

    def _decompress(self, lane: int, data: bytes, max_bytes: int) -> bytes:
        try:
            decompressor = self._decompressors.setdefault(lane, zlib.decompressobj())
            chunk: bytes = decompressor.decompress(data, max_bytes + 1)
        except zlib.error as error:
            raise ValueError("a piece that is damaged: %s" % error) from None
        return chunk
