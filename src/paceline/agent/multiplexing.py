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

from .congestion import PIECES, Pace

Message = Dict[str, Any]
AT_ONCE, TALK, FILES = range(3)
SHORT = 4 << 10  # bytes: longer words are no short ones, and a frame up to here goes whole
WORTH = 0.9  # of its size: what compresses to more is sent as it is


def lane_of(message: Message, size: int, blob: bytes) -> int:
    """The lane for a frame of ``size`` bytes.

    What happens on a node is heard in order, a rank's last words before its end; an answer may come
    before what happened earlier.
    """
    if "event" in message:
        return TALK
    if blob:
        return FILES
    return AT_ONCE if size <= SHORT else TALK


class Waiting:
    """A frame in a lane, and how much of it has gone."""

    def __init__(self, frame: bytes) -> None:
        self.size = len(frame)
        self._frame = frame
        self._at = 0
        self._zip: Any = None  # a compressor, whose type has no name
        self._worth_it = True
        self._ratio = 1.0

    @property
    def begun(self) -> bool:
        return self._at > 0

    @property
    def left(self) -> int:
        """Bytes that have not gone."""
        return self.size - self._at

    def whole(self) -> Optional[bytes]:
        """All of it, where it needs no pieces."""
        return self._frame if self.size <= SHORT and not self.begun else None

    def piece(self, size: int, narrow: bool) -> Tuple[Message, bytes]:
        """The next piece, of about so many bytes on the line."""
        wide = max(size, min(PIECES[1], int(size / self._ratio)))
        plain = self._frame[self._at : self._at + wide]
        self._at += len(plain)
        about: Message = {"more": self._at < self.size}
        if self._zip is None and not (narrow and self._worth_it):
            return about, plain
        first = self._zip is None
        if first:
            self._zip = zlib.compressobj(1)
        data = self._zip.compress(plain)
        data += self._zip.flush(zlib.Z_SYNC_FLUSH if about["more"] else zlib.Z_FINISH)
        self._ratio = max(0.1, len(data) / len(plain))
        if first and self._ratio > WORTH:
            self._zip, self._ratio, self._worth_it = None, 1.0, False
            return about, plain
        return dict(about, z=True), data


class Lanes:
    """The frames that wait for room on the line."""

    def __init__(self) -> None:
        self._lanes: Dict[int, Deque[Waiting]] = {TALK: deque(), FILES: deque()}
        self._size = {TALK: 0, FILES: 0}

    def add(self, lane: int, frame: bytes) -> Waiting:
        """Puts a frame at the end of its lane."""
        waiting = Waiting(frame)
        self._lanes[lane].append(waiting)
        self._size[lane] += waiting.size
        return waiting

    def withdraw(self, waiting: Waiting) -> bool:
        """Nobody needs it any more; whether it was not too late for that."""
        for number, lane in self._lanes.items():
            if waiting in lane and not waiting.begun:
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

    def next(self, pace: Pace) -> Tuple[Optional[bytes], Message, bytes]:
        """What goes next: a whole frame, or a piece as the frame that it becomes.

        IndexError when nothing waits.
        """
        number, lane = next(((n, lane) for n, lane in self._lanes.items() if lane), (0, None))
        if lane is None:
            raise IndexError("nothing waits")
        first = lane[0]
        whole = first.whole()
        if whole is not None:
            lane.popleft()
            self._size[number] -= first.size
            return whole, {}, b""
        before = first.left
        about, data = first.piece(pace.piece, pace.narrow)
        self._size[number] -= before - first.left
        if not about["more"]:
            lane.popleft()
        return None, dict(about, part=number), data


class Joiner:
    """Puts pieces together again.

    Args:
        most: Bytes of a frame, at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._frames: Dict[int, bytearray] = {}
        self._unzips: Dict[int, Any] = {}

    def add(self, message: Message, data: bytes) -> Iterator[bytes]:
        """The next piece; gives the frame once it is whole. ValueError for what is no piece."""
        lane = message["part"]
        if lane not in (TALK, FILES) or isinstance(lane, bool):
            raise ValueError("a piece of nothing")
        frame = self._frames.setdefault(lane, bytearray())
        if message.get("z"):
            data = self._unzip(lane, data, self._most - len(frame))
        frame += data
        if len(frame) > self._most:
            raise ValueError("a message of more than %d MiB" % (self._most >> 20))
        if not message.get("more"):
            del self._frames[lane]
            self._unzips.pop(lane, None)
            yield bytes(frame)

    def _unzip(self, lane: int, data: bytes, room: int) -> bytes:
        try:
            unzip = self._unzips.setdefault(lane, zlib.decompressobj())
            plain: bytes = unzip.decompress(data, room + 1)
        except zlib.error as error:
            raise ValueError("a piece that is damaged: %s" % error) from None
        return plain
