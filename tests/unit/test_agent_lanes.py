"""What waits for room on a line, in which order it goes, and how pieces become a frame again."""

from __future__ import annotations

import os
import random
import zlib

import pytest

from paceline.agent.congestion import CongestionWindow
from paceline.agent.multiplexing import (
    FILES,
    TALK,
    URGENT,
    WHOLE_BYTES,
    Reassembler,
    SendQueues,
    lane_of,
)

MOST = 1 << 20


def paced(rate: float | None) -> CongestionWindow:
    """As after a while on a line of so many bytes a second; ``None``: before anything is known."""
    pace = CongestionWindow()
    if rate is not None:
        pace.rate, pace._window = rate, int(rate * 0.08)
    return pace


def drained(lanes: SendQueues, pace: CongestionWindow) -> tuple[list[bytes], int]:
    """The frames in the order in which they come whole, and the bytes that it took."""
    joiner, frames, size = Reassembler(MOST), [], 0
    while lanes:
        frame, about, data = lanes.next(pace)
        size += len(frame or data)
        frames += [frame] if frame is not None else joiner.add(about, data)
    return frames, size


def test_which_lane() -> None:
    assert lane_of({"op": "lease"}, 60, b"") == URGENT
    assert lane_of({"re": 5}, WHOLE_BYTES, b"") == URGENT
    assert lane_of({"op": "start"}, WHOLE_BYTES + 1, b"") == TALK
    assert lane_of({"event": "rank ended"}, 60, b"") == TALK  # not before what the rank wrote
    assert lane_of({"event": "output"}, 70_000, b"x" * 69_000) == TALK
    assert lane_of({"op": "put_blob"}, 1 << 20, b"x" * (1 << 20)) == FILES
    assert lane_of({"re": 5}, 100, b"x") == FILES


@pytest.mark.parametrize("rate", [None, 1e5, 2e6, 1e9])
def test_frames_come_as_they_went(rate: float | None) -> None:
    chance = random.Random(5)
    sizes = [1, WHOLE_BYTES, WHOLE_BYTES + 1, 300_000, 10, MOST]
    made = [
        *(bytes(chance.choices(b"ab", k=size)) for size in sizes),
        *(chance.randbytes(size) for size in sizes),
    ]
    lanes = SendQueues()
    for frame in made:
        lanes.add(FILES, frame)
    assert lanes.size(FILES) == sum(map(len, made))
    frames, _ = drained(lanes, paced(rate))
    assert frames == made
    assert lanes.size(FILES) == 0


def test_the_conversation_goes_between_the_pieces_of_a_file() -> None:
    lanes, pace, joiner = SendQueues(), paced(None), Reassembler(MOST)
    lanes.add(FILES, b"f" * 100_000)
    _, about, data = lanes.next(pace)
    assert about == {"more": True, "part": FILES, "z": True}
    assert list(joiner.add(about, data)) == []
    lanes.add(TALK, b"t" * 10_000)
    lanes.add(TALK, b"short")
    came = []
    while lanes:
        frame, about, data = lanes.next(pace)
        came += [frame] if frame is not None else list(joiner.add(about, data))
    assert came == [b"t" * 10_000, b"short", b"f" * 100_000]


def test_a_slow_line_gets_less_to_carry_where_that_is_possible() -> None:
    text = b"".join(b"def function_%d(argument): return argument\n" % n for n in range(5000))
    noise = os.urandom(200_000)
    for frame, rate, most in (
        (text, 5e5, len(text) // 3),
        (noise, 5e5, len(noise)),  # what was compressed before is sent as it is
        (text, 1e8, len(text)),
    ):
        lanes = SendQueues()
        lanes.add(FILES, frame)
        frames, size = drained(lanes, paced(rate))
        assert frames == [frame]
        assert size <= most


def test_a_line_that_turns_out_to_be_slow_is_helped_from_then_on() -> None:
    lanes, pace, joiner = SendQueues(), paced(4e6 * 1.2), Reassembler(MOST)
    lanes.add(FILES, b"a" * 600_000)
    _, about, data = lanes.next(pace)
    assert "z" not in about
    came = list(joiner.add(about, data))
    pace = paced(1e5)
    _, about, data = lanes.next(pace)
    assert about["z"]
    came += joiner.add(about, data)
    while lanes:
        _, about, data = lanes.next(pace)
        came += joiner.add(about, data)
    assert came == [b"a" * 600_000]


def test_what_nobody_needs_any_more_is_not_sent() -> None:
    lanes, pace = SendQueues(), paced(None)
    first, second = (lanes.add(FILES, os.urandom(50_000)) for _ in "12")
    lanes.next(pace)
    assert not lanes.withdraw(first)  # half of it is gone
    assert lanes.withdraw(second)
    assert not lanes.withdraw(second)
    assert drained(lanes, pace)[1] == 50_000 - 4096
    lanes.add(TALK, b"x")
    lanes.clear(FILES)
    assert lanes
    lanes.clear()
    assert not lanes


@pytest.mark.parametrize("pieces", [
    [({"part": 0}, b"x")], [({"part": 7}, b"x")], [({"part": True}, b"x")],
    [({"part": []}, b"x")], [({"part": "1"}, b"x")], [({"part": None}, b"x")],
    [({"part": 1, "z": True}, b"no zlib")],
    [({"part": 1, "more": True}, b"x" * MOST), ({"part": 1}, b"x")],
    [({"part": 2, "z": True}, zlib.compress(bytes(50 * MOST)))],
])  # fmt: skip
def test_hostile_pieces(pieces: list[tuple[dict[str, object], bytes]]) -> None:
    joiner = Reassembler(MOST)

    def join() -> None:
        for message, data in pieces:
            list(joiner.add(message, data))

    with pytest.raises(ValueError):
        join()
