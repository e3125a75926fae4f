"""Tests the send queues of a connection: priorities, compression, and reassembly of pieces."""

from __future__ import annotations

import os
import random
import zlib

import pytest

from paceline.agent.congestion import PIECE_BYTES, CongestionWindow
from paceline.agent.multiplexing import (
    FILES,
    TALK,
    URGENT,
    WHOLE_BYTES,
    Reassembler,
    SendQueues,
    lane_of,
)

MAX_FRAME_BYTES = 1 << 20


def window_at_rate(rate: float | None) -> CongestionWindow:
    """Returns a window that has measured this rate in bytes/s, or nothing yet if ``None``."""
    pace = CongestionWindow()
    if rate is not None:
        pace.rate, pace._window = rate, int(rate * 0.08)
    return pace


def drain(lanes: SendQueues, pace: CongestionWindow) -> tuple[list[bytes], int]:
    """Returns the frames in the order in which they are complete, and the number of bytes sent."""
    joiner, frames, size = Reassembler(MAX_FRAME_BYTES), [], 0
    while lanes:
        frame, header, data = lanes.next(pace)
        size += len(frame or data)
        frames += [frame] if frame is not None else joiner.add(header, data)
    return frames, size


def test_lane_of_message() -> None:
    assert lane_of({"op": "lease"}, 60, b"") == URGENT
    assert lane_of({"re": 5}, WHOLE_BYTES, b"") == URGENT
    assert lane_of({"op": "start"}, WHOLE_BYTES + 1, b"") == TALK
    assert lane_of({"event": "rank ended"}, 60, b"") == TALK  # must not overtake the rank's output
    assert lane_of({"event": "output"}, 70_000, b"x" * 69_000) == TALK
    assert lane_of({"op": "put_blob"}, 1 << 20, b"x" * (1 << 20)) == FILES
    assert lane_of({"re": 5}, 100, b"x") == FILES


@pytest.mark.parametrize("rate", [None, 1e5, 2e6, 1e9])
def test_frames_arrive_unchanged_and_in_order(rate: float | None) -> None:
    rng = random.Random(5)
    sizes = [1, WHOLE_BYTES, WHOLE_BYTES + 1, 300_000, 10, MAX_FRAME_BYTES]
    sent_frames = [
        *(bytes(rng.choices(b"ab", k=size)) for size in sizes),
        *(rng.randbytes(size) for size in sizes),
    ]
    lanes = SendQueues()
    for frame in sent_frames:
        lanes.add(FILES, frame)
    assert lanes.size(FILES) == sum(map(len, sent_frames))
    frames, _ = drain(lanes, window_at_rate(rate))
    assert frames == sent_frames
    assert lanes.size(FILES) == 0


def test_messages_go_between_file_pieces() -> None:
    lanes, pace, joiner = SendQueues(), window_at_rate(None), Reassembler(MAX_FRAME_BYTES)
    lanes.add(FILES, b"f" * 100_000)
    _, header, data = lanes.next(pace)
    assert header == {"more": True, "part": FILES, "z": True}
    assert list(joiner.add(header, data)) == []
    lanes.add(TALK, b"t" * 10_000)
    lanes.add(TALK, b"short")
    received = []
    while lanes:
        frame, header, data = lanes.next(pace)
        received += [frame] if frame is not None else list(joiner.add(header, data))
    assert received == [b"t" * 10_000, b"short", b"f" * 100_000]


def test_compresses_on_slow_connection() -> None:
    text = b"".join(b"def function_%d(argument): return argument\n" % n for n in range(5000))
    noise = os.urandom(200_000)
    for frame, rate, max_size in (
        (text, 5e5, len(text) // 3),
        (noise, 5e5, len(noise)),  # incompressible data is sent unchanged
        (text, 1e8, len(text)),
    ):
        lanes = SendQueues()
        lanes.add(FILES, frame)
        frames, size = drain(lanes, window_at_rate(rate))
        assert frames == [frame]
        assert size <= max_size


def test_starts_compressing_when_rate_drops() -> None:
    lanes, pace, joiner = SendQueues(), window_at_rate(4e6 * 1.2), Reassembler(MAX_FRAME_BYTES)
    lanes.add(FILES, b"a" * 600_000)
    _, header, data = lanes.next(pace)
    assert "z" not in header
    received = list(joiner.add(header, data))
    pace = window_at_rate(1e5)
    _, header, data = lanes.next(pace)
    assert header["z"]
    received += joiner.add(header, data)
    while lanes:
        _, header, data = lanes.next(pace)
        received += joiner.add(header, data)
    assert received == [b"a" * 600_000]


def test_withdrawn_frames_are_not_sent() -> None:
    lanes, pace = SendQueues(), window_at_rate(None)
    first, second = (lanes.add(FILES, os.urandom(50_000)) for _ in "12")
    lanes.next(pace)
    assert not lanes.withdraw(first)  # half of it has been sent
    assert lanes.withdraw(second)
    assert not lanes.withdraw(second)
    assert drain(lanes, pace)[1] == 50_000 - 4096
    lanes.add(TALK, b"x")
    lanes.clear(FILES)
    assert lanes
    lanes.clear()
    assert not lanes


@pytest.mark.parametrize("pieces", [
    [({"part": 0}, b"x")], [({"part": 7}, b"x")], [({"part": True}, b"x")],
    [({"part": []}, b"x")], [({"part": "1"}, b"x")], [({"part": None}, b"x")],
    [({"part": 1, "z": True}, b"no zlib")],
    [({"part": 1, "more": True}, bytes(PIECE_BYTES[1]))] * 4 + [({"part": 1}, b"x")],
    [({"part": 2, "z": True}, zlib.compress(bytes(PIECE_BYTES[1] + 1)))],
    [({"part": 2}, bytes(PIECE_BYTES[1] + 1))],
])  # fmt: skip
def test_rejects_invalid_pieces(pieces: list[tuple[dict[str, object], bytes]]) -> None:
    joiner = Reassembler(MAX_FRAME_BYTES)

    def join() -> None:
        for message, data in pieces:
            list(joiner.add(message, data))

    with pytest.raises(ValueError):
        join()
