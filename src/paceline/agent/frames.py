"""The framed stream between launcher and agent: decoding, acknowledgement, and the agent's outbox.

A frame is ``MAGIC``, two big-endian 32-bit lengths, a JSON object (UTF-8) and raw bytes::

    4 bytes MAGIC | u32 length of JSON | u32 length of blob | JSON | blob

Bytes outside frames (login banners, noise of shell start-up files) are kept apart and never parsed.
``multiplexing.py`` splits and orders frames, ``congestion.py`` limits the bytes in flight.

A conversation may outlive its stream. Each frame says in ``heard`` how many frames its sender has
received; unacknowledged frames are kept (:class:`UnackedFrames`) and sent first on a new stream.
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
from .congestion import CongestionWindow

MAGIC = b"\xf5PL1"
_HEADER = struct.Struct(">4sII")
MAX_JSON = 64 * 1024 * 1024  # bytes
MAX_BLOB = 64 * 1024 * 1024
MAX_ANSWER = 12 * 1024 * 1024  # of JSON from a node: parsed, it may take twenty times as much
MAX_EVENT = 1024 * 1024  # of JSON of an event: parsing it blocks the launcher's event loop
MAX_OUTPUT = 64 * 1024  # bytes of a rank's output in an event
MAX_HELLO = 2 * 1024 * 1024  # of JSON before a node has said who it is
MAX_ANSWER_BLOB = 2 * 1024 * 1024
MAX_DIGITS = 20  # of a whole number
MAX_GARBAGE_BYTES = 64 * 1024 * 1024  # bytes of what looked like frames and was none
HIGH_WATER_BYTES = 8 * 1024 * 1024  # bytes after which the ranks' output is not read on, at most
MIN_OUTPUT_BYTES = 64 * 1024  # bytes of it that are always read
MAX_NOISE_BYTES = 8192  # kept of what is outside frames
ACK_BYTES = 4 * 1024  # bytes heard, after which who has nothing to say says that it heard them
WRITE_BYTES = 1 << 16  # bytes of one write
WRITE_FRAMES = 64

ANSWER_START = b'{"re":'  # so that the kind of a long message is known before it is parsed

Message = Dict[str, Any]


class FrameError(ValueError):
    """The stream has too many bytes that look like frames but are invalid."""


def encode(message: Message, blob: bytes = b"", max_bytes: int = MAX_JSON) -> bytes:
    """Encodes a frame; lone surrogates (undecodable bytes) survive.

    ValueError if the JSON is longer than ``max_bytes``.
    """
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > max_bytes:
        raise ValueError("a message of %d MiB is too long" % (len(body) >> 20))
    return _HEADER.pack(MAGIC, len(body), len(blob)) + body + blob


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError("a number of %d digits" % len(digits))
    return int(digits)


_JSON = json.JSONDecoder(parse_int=_parse_int)


def _parse(body: bytearray) -> Optional[Message]:
    """Parses the JSON object of a frame; ``None`` if it is invalid."""
    try:
        message = _JSON.decode(body.decode())
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


class Decoder:
    """Turns a stream of bytes into frames.

    Args:
        max_json, max_blob: Bytes above which something is no frame.
        max_event: Bytes of JSON above which a frame must be an answer.

    Attributes:
        noise: The last bytes outside frames.
    """

    def __init__(
        self, max_json: int = MAX_JSON, max_blob: int = MAX_BLOB, max_event: int = MAX_JSON
    ) -> None:
        self._buffer = bytearray()
        self._max_json, self._max_blob, self._max_event = max_json, max_blob, max_event
        self._garbage_bytes = 0
        self.noise = bytearray()

    def allow(self, max_json: int, max_event: int) -> None:
        """Sets the maximum lengths of messages and of events."""
        self._max_json, self._max_event = max_json, max_event

    @property
    def is_mid_frame(self) -> bool:
        return self._buffer.startswith(MAGIC)

    def feed(self, data: bytes) -> List[Tuple[Message, bytes]]:
        """Adds ``data``; returns the frames that are now whole, in order.

        FrameError when too much looked like frames and was none, or for too long an event.
        """
        self._buffer += data
        frames: List[Tuple[Message, bytes]] = []
        while True:
            self._skip_noise()
            if len(self._buffer) < _HEADER.size:
                return frames
            magic, body_length, blob_length = _HEADER.unpack_from(self._buffer)
            exceeds_limit = body_length > self._max_json or blob_length > self._max_blob
            first_byte = bytes(self._buffer[_HEADER.size : _HEADER.size + 1])
            if exceeds_limit or first_byte not in (b"", b"{"):
                self._drop(len(MAGIC))  # not a frame after all: look for the next one
                continue
            end = _HEADER.size + body_length + blob_length
            if len(self._buffer) < end:
                return frames
            body = self._buffer[_HEADER.size : _HEADER.size + body_length]
            if body_length > self._max_event and not body.startswith(ANSWER_START):
                raise FrameError("an event of %d MiB" % (body_length >> 20))
            message = _parse(body)
            if message is None:
                self._garbage_bytes += end
                if self._garbage_bytes > MAX_GARBAGE_BYTES:
                    raise FrameError("%d MiB of broken messages" % (self._garbage_bytes >> 20))
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
        self.add_noise(bytes(self._buffer[:count]))
        del self._buffer[:count]

    def add_noise(self, data: bytes) -> None:
        """Keeps the last bytes outside frames."""
        self.noise += data[-MAX_NOISE_BYTES:]
        del self.noise[:-MAX_NOISE_BYTES]


class UnackedFrames:
    """Frames that were sent and not acknowledged.

    Attributes:
        size: Bytes of them all.
    """

    def __init__(self) -> None:
        self.size = 0
        self._num_acked = 0  # how many there were before the first that is kept
        self._frames: Deque[bytes] = deque()

    def add(self, frame: bytes) -> None:
        """Keeps a frame that was just sent, until it is acknowledged."""
        self._frames.append(frame)
        self.size += len(frame)

    def acknowledge(self, count: object) -> int:
        """Drops the first ``count`` frames of the conversation; returns how many of them are new.

        ValueError if so many were never sent.
        """
        if not isinstance(count, int) or not 0 <= count <= self.num_sent:
            raise ValueError("so many messages were never sent")
        num_acked = max(0, count - self._num_acked)
        for _ in range(num_acked):
            self.size -= len(self._frames.popleft())
        self._num_acked += num_acked
        return num_acked

    @property
    def num_sent(self) -> int:
        """Total number of frames sent."""
        return self._num_acked + len(self._frames)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._frames)

    def requeue(self) -> List[bytes]:
        """Returns the kept frames, oldest first; they count as not sent."""
        frames, self._frames, self.size = list(self._frames), deque(), 0
        return frames


class Outbox:
    """Frames to the launcher: bounded, never blocks the loop, safe from threads.

    Attributes:
        fd: Non-blocking descriptor of the stream.
        broken: The reader has gone. Frames wait if the outbox retains them, else they are dropped.
        retains: Frames are kept until they are acknowledged: another stream may come.
        num_received: How many of the launcher's frames the agent has received.
    """

    def __init__(self, fd: int, wake_fd: int) -> None:
        self.fd = fd
        self.broken = False
        self.retains = False
        self.num_received = 0
        self._wake_fd = wake_fd
        self._lanes = multiplexing.SendQueues()
        self._window = CongestionWindow()
        self._is_closing = False
        self._unsent: Deque[bytes] = deque()
        self._unsent_bytes = 0  # bytes of these
        self._offset = 0  # bytes of the first that are out
        self._unacked = UnackedFrames()
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Bytes that are ready to be written."""
        return self._unsent_bytes - self._offset

    @property
    def empty(self) -> bool:
        """Whether all has been written."""
        return not self._unsent and not self._lanes

    @property
    def full(self) -> bool:
        """Whether more output of the ranks would delay later frames."""
        waiting = self._unsent_bytes + self._unacked.size + self._lanes.size(multiplexing.TALK)
        if self.broken:
            return waiting > HIGH_WATER_BYTES
        return waiting > max(MIN_OUTPUT_BYTES, min(HIGH_WATER_BYTES, 4 * self._window.window))

    def post(self, message: Message, blob: bytes = b"") -> None:
        """Queues a frame; from any thread. ValueError if it is too long for the launcher."""
        is_hello = message.get("event") == "hello"
        max_bytes = MAX_ANSWER if "re" in message else MAX_HELLO if is_hello else MAX_EVENT
        frame = encode(dict(message, heard=self.num_received), blob, max_bytes)
        lane = multiplexing.lane_of(message, len(frame), blob)
        with self._lock:
            is_lost = self.broken and not self.retains
            is_late = self._is_closing and lane == multiplexing.FILES
            if lane == multiplexing.URGENT and not is_lost:
                self._enqueue(frame)
            elif not (is_lost or is_late):
                self._lanes.add(lane, frame)
                self._fill()
        self._wake()

    def start_closing(self) -> None:
        """Drops queued files and stops limiting the window, because the agent ends soon."""
        with self._lock:
            self._is_closing = True
            self._lanes.clear(multiplexing.FILES)
            self._fill()

    def _fill(self) -> None:
        """Moves frames from the queues to the stream as far as the window allows."""
        while self._lanes and (self._is_closing or self._window.has_room):
            frame, header, data = self._lanes.next(self._window)
            self._enqueue(frame or encode(dict(header, heard=self.num_received), data))

    def _enqueue(self, frame: bytes) -> None:
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        self._window.sent(len(frame), time.monotonic(), bool(self._lanes))

    def flush(self) -> None:
        """Writes as much as the descriptor takes."""
        with self._lock:
            while self._unsent and not self.broken and self._write():
                self._retire()

    def _write(self) -> bool:
        """Writes some bytes; returns whether the descriptor took any."""
        pieces = [memoryview(self._unsent[0])[self._offset : self._offset + WRITE_BYTES]]
        length = len(pieces[0])
        for frame in islice(self._unsent, 1, WRITE_FRAMES):
            if length == WRITE_BYTES:
                break
            pieces.append(memoryview(frame)[: WRITE_BYTES - length])
            length += len(pieces[-1])
        try:
            self._offset += os.writev(self.fd, pieces)
        except BlockingIOError:
            return False
        except OSError:
            self._break()
            return False
        return True

    def _retire(self) -> None:
        """Moves frames that were written whole to the unacknowledged ones."""
        while self._unsent and self._offset >= len(self._unsent[0]):
            frame = self._unsent.popleft()
            self._offset -= len(frame)
            self._unsent_bytes -= len(frame)
            self._unacked.add(frame)

    def _break(self) -> None:
        self.broken, self._offset = True, 0  # half a frame is as good as none
        if not self.retains:
            self._lanes.clear()
            self._unsent.clear()
            self._unsent_bytes = 0

    def disconnect(self) -> None:
        """Stops writing to the descriptor."""
        with self._lock:
            self._break()

    def acknowledge(self, count: object) -> None:
        """Takes the launcher's count of our frames. ValueError for more than were sent."""
        with self._lock:
            if num_acked := self._unacked.acknowledge(count):
                self._window.acknowledge(num_acked, time.monotonic())
                self._fill()

    def has_sent(self, count: int) -> bool:
        """Whether at least so many frames have been sent."""
        with self._lock:
            return 0 <= count <= self._unacked.num_sent

    def resume(self, fd: int, count: int) -> None:
        """Continues on another descriptor, after the first ``count`` frames."""
        with self._lock:
            self._unacked.acknowledge(count)
            frames = self._unacked.requeue()
            self._unsent.extendleft(reversed(frames))
            self._unsent_bytes += sum(map(len, frames))
            self.fd, self.broken, self._offset = fd, False, 0
            self._window = CongestionWindow()  # it is another line
            for frame in self._unsent:
                self._window.sent(len(frame), time.monotonic(), bool(self._lanes))
            self._fill()
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_fd, b"w")
        except BlockingIOError:
            pass  # a wake-up is already waiting
        except OSError:
            self.broken = True
