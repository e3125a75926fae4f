"""The framed stream between launcher and agent.

A frame is ``MAGIC``, two big-endian 32-bit lengths, a JSON object (UTF-8) and raw bytes::

    4 bytes MAGIC | u32 length of JSON | u32 length of blob | JSON | blob

Whatever stands outside a frame (login banners, noise of shell start-up files) is kept apart and
never read as data. What an agent says waits in its :class:`Outbox`. How long frames are cut into
pieces, and which go first, says ``lanes.py``; how much is under way, ``pace.py``.

A conversation may outlive its stream. Both sides count the frames that they heard, and every frame
says in ``heard`` how many that were when it was made; what was not heard yet is kept
(:class:`Unheard`). On a new stream each side begins with the first frame that the other one has not
heard, so none is lost and none comes twice.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections import deque
from itertools import islice
from typing import Any, Deque, Dict, Iterator, List, Optional, Tuple

from . import multiplexing
from .congestion import Pace

MAGIC = b"\xf5PL1"
_HEADER = struct.Struct(">4sII")
MAX_JSON = 64 * 1024 * 1024  # bytes
MAX_BLOB = 64 * 1024 * 1024
MAX_ANSWER = 12 * 1024 * 1024  # of JSON from a node: parsed, it may take twenty times as much
MAX_HELLO = 2 * 1024 * 1024  # of JSON before a node has said who it is
MAX_ANSWER_BLOB = 2 * 1024 * 1024
MOST_DIGITS = 20  # of a whole number
MOST_WASTED = 64 * 1024 * 1024  # bytes of what looked like frames and was none
HIGH_WATER = 8 * 1024 * 1024  # bytes after which the ranks' output is not read on, at most
OUTPUT_LEAST = 64 * 1024  # bytes of it that are always read
SAY_HEARD = 4 * 1024  # bytes heard, after which who has nothing to say says that it heard them
AT_ONCE = 1 << 16  # bytes of one write
FRAMES_AT_ONCE = 64

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

    def allow(self, max_json: int) -> None:
        """Takes messages up to this length from now on."""
        self._max_json = max_json

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


class Unheard:
    """Frames that were said, until the other side has told that it heard them.

    Attributes:
        size: Bytes of them all.
    """

    def __init__(self) -> None:
        self.size = 0
        self._heard = 0  # how many there were before the first that is kept
        self._frames: Deque[bytes] = deque()

    def add(self, frame: bytes) -> None:
        """Keeps one that was just said."""
        self._frames.append(frame)
        self.size += len(frame)

    def heard(self, count: object) -> int:
        """Lets go of the first ``count`` frames of the conversation; how many of these are new.

        What was known before is no news. ValueError when so many were never said.
        """
        if not isinstance(count, int) or not 0 <= count <= self.said:
            raise ValueError("so many messages were never sent")
        fresh = max(0, count - self._heard)
        for _ in range(fresh):
            self.size -= len(self._frames.popleft())
        self._heard += fresh
        return fresh

    @property
    def said(self) -> int:
        """How many frames there were in all."""
        return self._heard + len(self._frames)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._frames)

    def take_back(self) -> List[bytes]:
        """Those that are kept, the oldest first; they count as not said."""
        frames, self._frames, self.size = list(self._frames), deque(), 0
        return frames


class Outbox:
    """What is said to the launcher: bounded, never blocking the loop, safe from threads.

    Lanes of frames, of which as much is under way as the line carries soon, in front of a
    non-blocking descriptor.

    Attributes:
        fd: Where they go, if it is not ``broken``.
        broken: True after the reader has gone. Further frames wait if the outbox keeps them, else
            they are dropped.
        keeps: What was written is kept until it was heard: another stream may come.
        heard: How many of the launcher's frames we have heard.
    """

    def __init__(self, fd: int, wake_fd: int) -> None:
        self.fd = fd
        self.broken = False
        self.keeps = False
        self.heard = 0
        self._wake_fd = wake_fd
        self._lanes = multiplexing.Lanes()
        self._pace = Pace()
        self._hurry = False
        self._unsent: Deque[bytes] = deque()
        self._waiting = 0  # bytes of these
        self._begun = 0  # bytes of the first that are out
        self._unheard = Unheard()
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Bytes that may be written now."""
        return self._waiting - self._begun

    @property
    def empty(self) -> bool:
        """Whether all has been written."""
        return not self._unsent and not self._lanes

    @property
    def full(self) -> bool:
        """Whether more of the ranks' output would make what comes after it late."""
        waiting = self._waiting + self._unheard.size + self._lanes.size(multiplexing.TALK)
        if self.broken:
            return waiting > HIGH_WATER
        return waiting > max(OUTPUT_LEAST, min(HIGH_WATER, 4 * self._pace.window))

    def post(self, message: Message, blob: bytes = b"") -> None:
        """Queues a frame; from any thread. ValueError when it is longer than a launcher takes."""
        frame = encode(dict(message, heard=self.heard), blob, MAX_ANSWER)
        lane = multiplexing.lane_of(message, len(frame), blob)
        with self._lock:
            if (self.broken and not self.keeps) or (self._hurry and lane == multiplexing.FILES):
                pass
            elif lane == multiplexing.AT_ONCE:
                self._let_go(frame)
            else:
                self._lanes.add(lane, frame)
                self._fill()
        self._wake()

    def hurry(self) -> None:
        """What there is to say is to go now: the last of it comes soon, and no file after it."""
        with self._lock:
            self._hurry = True
            self._lanes.clear(multiplexing.FILES)
            self._fill()

    def _fill(self) -> None:
        """Lets go what there is room for on the line."""
        while self._lanes and (self._hurry or self._pace.room):
            frame, about, data = self._lanes.next(self._pace)
            self._let_go(frame or encode(dict(about, heard=self.heard), data))

    def _let_go(self, frame: bytes) -> None:
        self._unsent.append(frame)
        self._waiting += len(frame)
        self._pace.sent(len(frame), time.monotonic(), bool(self._lanes))

    def flush(self) -> None:
        """Writes what the descriptor takes now."""
        with self._lock:
            while self._unsent and not self.broken:
                written = self._write()
                if written is None:
                    break
                self._begun += written
                self._set_aside()

    def _write(self) -> Optional[int]:
        pieces = [memoryview(self._unsent[0])[self._begun : self._begun + AT_ONCE]]
        length = len(pieces[0])
        for frame in islice(self._unsent, 1, FRAMES_AT_ONCE):
            if length == AT_ONCE:
                break
            pieces.append(memoryview(frame)[: AT_ONCE - length])
            length += len(pieces[-1])
        try:
            return os.writev(self.fd, pieces)
        except BlockingIOError:
            return None
        except OSError:
            self._break()
            return None

    def _set_aside(self) -> None:
        """What has gone out whole is no longer unsent."""
        while self._unsent and self._begun >= len(self._unsent[0]):
            frame = self._unsent.popleft()
            self._begun -= len(frame)
            self._waiting -= len(frame)
            self._unheard.add(frame)

    def _break(self) -> None:
        self.broken, self._begun = True, 0  # half a frame is as good as none
        if not self.keeps:
            self._lanes.clear()
            self._unsent.clear()
            self._waiting = 0

    def cut(self) -> None:
        """Nothing more goes out by the descriptor."""
        with self._lock:
            self._break()

    def heard_by_launcher(self, count: object) -> None:
        """How many of our frames it has heard. ValueError when so many were never sent."""
        with self._lock:
            if fresh := self._unheard.heard(count):
                self._pace.heard(fresh, time.monotonic())
                self._fill()

    def has_said(self, count: int) -> bool:
        """Whether so many frames of all have gone out."""
        with self._lock:
            return 0 <= count <= self._unheard.said

    def go_on(self, fd: int, count: int) -> None:
        """Begins on another descriptor, after the first ``count`` frames of all."""
        with self._lock:
            self._unheard.heard(count)
            again = self._unheard.take_back()
            self._unsent.extendleft(reversed(again))
            self._waiting += sum(map(len, again))
            self.fd, self.broken, self._begun = fd, False, 0
            self._pace = Pace()  # it is another line
            for frame in self._unsent:
                self._pace.sent(len(frame), time.monotonic(), bool(self._lanes))
            self._fill()
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_fd, b"w")
        except BlockingIOError:
            pass  # a wake-up is already waiting
        except OSError:
            self.broken = True
