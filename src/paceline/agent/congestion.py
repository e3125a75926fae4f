"""How much may be under way at once, so that what is said next arrives soon. Pure.

A line that is narrower than what is written to it gathers all of it in buffers, in which a short
word waits behind megabytes. So who sends much looks how late it is heard: by more than
:data:`QUEUE_S` over the round trip, and it has less under way; by less, and it has more.
Lines differ by a factor of 10,000 and change while they are used, so it looks all the time.

Processes that get no CPU answer late, too, and less under way would not help them. What counts is
therefore the quickest of all answers within an interval, since a queue delays every one of them.
And the round trip is the usual one of moments in which less was sent, not the shortest ever.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, NamedTuple, Optional

TARGET_QUEUE_S = 0.08  # of the line's time may wait in front of it
MIN_WINDOW, MAX_WINDOW = 16 << 10, 4 << 20  # bytes under way, whatever was measured
INTERVAL_S = 0.05  # until more may be under way, or a round trip where that is longer
MIN_DECREASE_S = 0.3  # until less may be
RATE_SAMPLES = 8  # intervals of which the fastest counts
LINEAR_STEPS = 3  # times in a row that it grows a little, before it is doubled
PROBE_INTERVAL_S = 2.0  # how often less is sent for a round trip, to see how short that can be
PROBE_SAMPLES = 3  # of which the one in the middle counts
PIECE_BYTES = 4 << 10, 256 << 10  # bytes of a piece of something large, at least and at most
NARROW_BYTES_PER_S = 4 << 20  # bytes a second: faster lines are not waited for longer than for zlib
WIDE_WINDOW = 256 << 10  # bytes under way, of which a line is certainly fast, or far


class _Sent(NamedTuple):
    """A message under way: when it went, its size, how many bytes had been heard by then."""

    sent_at: float
    size: int
    acknowledge: int
    has_backlog: bool  # others waited for room
    is_probe: bool  # it went when less was sent


class CongestionWindow:
    """Measures one direction of a line by what the other side says that it has heard.

    All times are seconds of any one clock.

    Attributes:
        under_way: Bytes that were sent and not heard yet.
        rate: Bytes a second that the line carries, as far as is known; ``None`` before.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.rate: Optional[float] = None
        self._window = MIN_WINDOW
        self._acked_bytes = 0  # bytes
        self._sent: Deque[_Sent] = deque()
        self._changed_at = float("-inf")  # when the window last was
        self._min_trip_s = float("inf")  # round trip of what was sent since
        self._max_rate = 0.0  # rate in the same time
        self._rates: Deque[float] = deque(maxlen=RATE_SAMPLES)
        self._num_growths = LINEAR_STEPS  # how many times in a row
        self._base_trip_s = float("inf")  # round trip
        self._probe_trips_s: Deque[float] = deque(maxlen=PROBE_SAMPLES)
        self._is_probing = False  # less is sent just now
        self._probed_at: Optional[float] = None

    def sent(self, size: int, now: float, has_backlog: bool) -> None:
        """A message went out; ``more``: others wait until there is room."""
        self._sent.append(
            _Sent(now, size, self._acked_bytes, has_backlog, self._is_probing and self.has_room)
        )
        self.in_flight += size

    def acknowledge(self, count: int, now: float) -> None:
        """The other side has heard the next ``count`` messages."""
        message = None
        for _ in range(min(count, len(self._sent))):
            message = self._sent.popleft()
            self.in_flight -= message.size
            self._acked_bytes += message.size
        if message is None:
            return
        trip_s = max(now - message.sent_at, 1e-6)
        self._base_trip_s = min(trip_s, self._base_trip_s)
        if message.is_probe and self._is_probing:  # the first of them
            self._probe_trips_s.append(trip_s)
            self._is_probing, self._probed_at, self._changed_at = False, now, now
        elif (
            message.has_backlog
            and not self._is_probing
            and not message.is_probe
            and message.sent_at >= self._changed_at
        ):
            self._min_trip_s = min(trip_s, self._min_trip_s)
            self._max_rate = max((self._acked_bytes - message.acknowledge) / trip_s, self._max_rate)
            if now - self._changed_at >= max(INTERVAL_S, self._min_trip_s):
                self._resize(now)

    def _resize(self, now: float) -> None:
        """Judges by what was sent since the last change."""
        is_queueing = self._min_trip_s - self.base_trip_s >= TARGET_QUEUE_S / 2
        if is_queueing and now - self._changed_at < MIN_DECREASE_S:
            return
        self._rates.append(self._max_rate)
        self.rate = max(self._rates)
        if not is_queueing:
            self._num_growths += 1
            factor = 2.0 if self._num_growths > LINEAR_STEPS else 1.25
        else:
            self._num_growths = 0
            factor = max(0.5, min(1.25, (self.base_trip_s + TARGET_QUEUE_S) / self._min_trip_s))
        self._window = max(MIN_WINDOW, min(MAX_WINDOW, int(self._window * factor)))
        self._changed_at, self._min_trip_s, self._max_rate = now, float("inf"), 0.0
        if self._probed_at is None:
            self._probed_at = now
        self._is_probing = now - self._probed_at > PROBE_INTERVAL_S

    @property
    def base_trip_s(self) -> float:
        """Seconds of a round trip when nothing waits before the line."""
        return (
            sorted(self._probe_trips_s)[(len(self._probe_trips_s) - 1) // 2]
            if self._probe_trips_s
            else self._base_trip_s
        )

    @property
    def window(self) -> int:
        """Bytes that may be under way."""
        if not self._is_probing:
            return self._window
        return max(
            MIN_WINDOW,
            int(self._window * self.base_trip_s / (self.base_trip_s + TARGET_QUEUE_S) / 2),
        )

    @property
    def has_room(self) -> bool:
        """Whether another piece may go."""
        return self.in_flight < self.window

    @property
    def piece(self) -> int:
        """Bytes of the next piece of something large: a few of them are under way."""
        return max(PIECE_BYTES[0], min(PIECE_BYTES[1], self.window // 4))

    @property
    def is_narrow(self) -> bool:
        """Whether it is waited for the line, rather than for whoever compresses."""
        return self.window < WIDE_WINDOW or (
            self.rate is not None and self.rate < NARROW_BYTES_PER_S
        )
