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

QUEUE_S = 0.08  # of the line's time may wait in front of it
LEAST, MOST = 16 << 10, 4 << 20  # bytes under way, whatever was measured
INTERVAL_S = 0.05  # until more may be under way, or a round trip where that is longer
PATIENT_S = 0.3  # until less may be
RATES = 8  # intervals of which the fastest counts
DOUBLED = 3  # times in a row that it grows a little, before it is doubled
DIP_S = 2.0  # how often less is sent for a round trip, to see how short that can be
DIPS = 3  # of which the one in the middle counts
PIECES = 4 << 10, 256 << 10  # bytes of a piece of something large, at least and at most
NARROW = 4 << 20  # bytes a second: faster lines are not waited for longer than for zlib
WIDE = 256 << 10  # bytes under way, of which a line is certainly fast, or far


class _Sent(NamedTuple):
    """A message under way: when it went, its size, how many bytes had been heard by then."""

    when: float
    size: int
    heard: int
    more: bool  # others waited for room
    dipped: bool  # it went when less was sent


class Pace:
    """Measures one direction of a line by what the other side says that it has heard.

    All times are seconds of any one clock.

    Attributes:
        under_way: Bytes that were sent and not heard yet.
        rate: Bytes a second that the line carries, as far as is known; ``None`` before.
    """

    def __init__(self) -> None:
        self.under_way = 0
        self.rate: Optional[float] = None
        self._window = LEAST
        self._heard = 0  # bytes
        self._sent: Deque[_Sent] = deque()
        self._changed = float("-inf")  # when the window last was
        self._quickest = float("inf")  # round trip of what was sent since
        self._fastest = 0.0  # rate in the same time
        self._rates: Deque[float] = deque(maxlen=RATES)
        self._grown = DOUBLED  # how many times in a row
        self._shortest = float("inf")  # round trip
        self._trips: Deque[float] = deque(maxlen=DIPS)
        self._dip = False  # less is sent just now
        self._dipped: Optional[float] = None

    def sent(self, size: int, now: float, more: bool) -> None:
        """A message went out; ``more``: others wait until there is room."""
        self._sent.append(_Sent(now, size, self._heard, more, self._dip and self.room))
        self.under_way += size

    def heard(self, count: int, now: float) -> None:
        """The other side has heard the next ``count`` messages."""
        last = None
        for _ in range(min(count, len(self._sent))):
            last = self._sent.popleft()
            self.under_way -= last.size
            self._heard += last.size
        if last is None:
            return
        trip = max(now - last.when, 1e-6)
        self._shortest = min(trip, self._shortest)
        if last.dipped and self._dip:  # the first of them
            self._trips.append(trip)
            self._dip, self._dipped, self._changed = False, now, now
        elif last.more and not self._dip and not last.dipped and last.when >= self._changed:
            self._quickest = min(trip, self._quickest)
            self._fastest = max((self._heard - last.heard) / trip, self._fastest)
            if now - self._changed >= max(INTERVAL_S, self._quickest):
                self._change(now)

    def _change(self, now: float) -> None:
        """Judges by what was sent since the last change."""
        late = self._quickest - self.trip >= QUEUE_S / 2
        if late and now - self._changed < PATIENT_S:
            return
        self._rates.append(self._fastest)
        self.rate = max(self._rates)
        if not late:
            self._grown += 1
            change = 2.0 if self._grown > DOUBLED else 1.25
        else:
            self._grown = 0
            change = max(0.5, min(1.25, (self.trip + QUEUE_S) / self._quickest))
        self._window = max(LEAST, min(MOST, int(self._window * change)))
        self._changed, self._quickest, self._fastest = now, float("inf"), 0.0
        if self._dipped is None:
            self._dipped = now
        self._dip = now - self._dipped > DIP_S

    @property
    def trip(self) -> float:
        """Seconds of a round trip when nothing waits before the line."""
        return sorted(self._trips)[(len(self._trips) - 1) // 2] if self._trips else self._shortest

    @property
    def window(self) -> int:
        """Bytes that may be under way."""
        if not self._dip:
            return self._window
        return max(LEAST, int(self._window * self.trip / (self.trip + QUEUE_S) / 2))

    @property
    def room(self) -> bool:
        """Whether another piece may go."""
        return self.under_way < self.window

    @property
    def piece(self) -> int:
        """Bytes of the next piece of something large: a few of them are under way."""
        return max(PIECES[0], min(PIECES[1], self.window // 4))

    @property
    def narrow(self) -> bool:
        """Whether it is waited for the line, rather than for whoever compresses."""
        return self.window < WIDE or (self.rate is not None and self.rate < NARROW)
