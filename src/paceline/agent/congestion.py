"""Congestion control of the stream: limits the bytes in flight so that new frames arrive soon.

A slow line buffers what is written to it, and an urgent frame waits behind megabytes. So the sender
watches how late frames are acknowledged: if that exceeds the base round trip by more than
:data:`TARGET_QUEUE_S` the window shrinks, else it grows, similar to TCP Vegas and LEDBAT. Only the
fastest acknowledgement of an interval counts, because a busy receiver delays only some. The base
round trip is the median of probes during which less is sent, not the shortest ever seen.
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
    """A frame in flight: when it was sent, its size, and the bytes acknowledged by then."""

    sent_at: float
    size: int
    acknowledge: int
    has_backlog: bool  # others waited for room
    is_probe: bool  # it went when less was sent


class CongestionWindow:
    """Window of one direction, from the sender's times and the receiver's acknowledgements.

    Attributes:
        in_flight: Bytes sent and not acknowledged.
        rate: Bytes per second that the line carries; ``None`` while unknown.
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
        """Records a frame; ``has_backlog``: more wait for room."""
        is_probe = self._is_probing and self.has_room
        self._sent.append(_Sent(now, size, self._acked_bytes, has_backlog, is_probe))
        self.in_flight += size

    def acknowledge(self, count: int, now: float) -> None:
        """Records that the receiver has the next ``count`` frames."""
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
        if message.is_probe or self._is_probing:
            return
        if message.has_backlog and message.sent_at >= self._changed_at:
            self._min_trip_s = min(trip_s, self._min_trip_s)
            self._max_rate = max((self._acked_bytes - message.acknowledge) / trip_s, self._max_rate)
            if now - self._changed_at >= max(INTERVAL_S, self._min_trip_s):
                self._resize(now)

    def _resize(self, now: float) -> None:
        """Adapts the window to what was measured since the last change."""
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
        """Round trip while nothing queues in front of the line."""
        if not self._probe_trips_s:
            return self._base_trip_s
        return sorted(self._probe_trips_s)[(len(self._probe_trips_s) - 1) // 2]

    @property
    def window(self) -> int:
        """Bytes that may be in flight."""
        if not self._is_probing:
            return self._window
        base_trip_s = self.base_trip_s
        return max(MIN_WINDOW, int(self._window * base_trip_s / (base_trip_s + TARGET_QUEUE_S) / 2))

    @property
    def has_room(self) -> bool:
        """Whether another piece may be sent."""
        return self.in_flight < self.window

    @property
    def piece(self) -> int:
        """Bytes of the next piece of a large frame: several fit into the window."""
        return max(PIECE_BYTES[0], min(PIECE_BYTES[1], self.window // 4))

    @property
    def is_narrow(self) -> bool:
        """Whether the line is slower than compression."""
        is_slow = self.rate is not None and self.rate < NARROW_BYTES_PER_S
        return is_slow or self.window < WIDE_WINDOW
