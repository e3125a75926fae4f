"""What a step takes by each way to communicate: the choice of ``auto``, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.spec.figures import lasting

CANDIDATES = ("exact", "fp16", "int8", "int4")
"""From the least to the most that is left out. No other is taken without being asked for."""
NEARLY = 1.05
"""So near to the quickest, the way that leaves out less is taken."""
_FORWARD = 1 / 3  # part of computing in which no gradient is ready
_BUCKETS = (1, 2, 4, 8, 16)
_LEAST_BUCKET = 1 << 16  # bytes
_WON = 0.5  # part of what late updates could save at best that is counted on (bench/overlap)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ranks measured: the slowest of them in each.

    Attributes:
        computing: Seconds of a step without any exchange.
        gradients: Bytes of all gradients.
        latency: Seconds of a collective of a few bytes.
        rate: Bytes a second that a rank can send while it receives as many.
        sent: Bytes that a rank sends in a step, by way.
        coding: Seconds of a step for making and reading messages, by way.
        late: Ways by which updates may come late: bytes pass beside the next forward pass, too.
    """

    computing: float
    gradients: int
    latency: float
    rate: float
    sent: Mapping[str, int]
    coding: Mapping[str, float]
    late: frozenset[str] = frozenset()

    def seconds(self, way: str, buckets: int) -> float:
        """Of a step in so many buckets; by the better of two ways to hide them."""
        in_time = self._in_time(way, buckets)
        if way not in self.late:
            return in_time
        return in_time - _WON * max(0.0, in_time - self._late(way, buckets))

    def _late(self, way: str, buckets: int) -> float:
        """At best: the line has nearly the whole step for its bytes.

        Either all is computed and one bucket is waited for, or the line is always busy but while
        the first bucket of a step is computed.
        """
        line = self.sent[way] / self.rate
        computed = self.computing + line / buckets + self.latency
        sent = line + buckets * self.latency + self.computing / buckets
        return self.coding[way] + max(computed, sent)

    def _in_time(self, way: str, buckets: int) -> float:
        """A bucket is sent while the gradients of the next are computed.

        Either the last gradient has to be waited for and then its bucket, or the line is always
        busy from the first bucket on.
        """
        backward = (1 - _FORWARD) * self.computing
        line = self.sent[way] / self.rate
        ends = max(
            backward + line / buckets + self.latency,
            backward / buckets + line + buckets * self.latency,
        )
        return _FORWARD * self.computing + self.coding[way] + ends

    def best(self, way: str) -> tuple[int, float]:
        """Into how many buckets gradients are best divided, and the seconds of a step then."""
        most = max(1, self.gradients // _LEAST_BUCKET)
        every = {one: self.seconds(way, one) for one in _BUCKETS if one <= most}
        found = min(every, key=lambda one: every[one])
        return found, every[found]


@dataclass(frozen=True, slots=True)
class Choice:
    """A way, with what speaks for it.

    Attributes:
        way: Its name.
        buckets: Into how many parts gradients are divided.
        seconds: Of a step, by way.
    """

    way: str
    buckets: int
    seconds: Mapping[str, float]

    def said(self, measured: Measured) -> str:
        """In one line."""
        others = ", ".join(
            f"{name} {lasting(one)}" for name, one in self.seconds.items() if name != self.way
        )
        line = measured.sent["exact"] / measured.rate
        return (
            f"{self.way}, by which a step takes about {lasting(self.seconds[self.way])}"
            f" ({others}): computing takes {lasting(measured.computing)}, and"
            f" {measured.sent['exact'] / 1e6:.1f} MB of gradients {lasting(line)}"
            f" at {measured.rate * 8e-6:,.0f} Mbit/s"
        )


def chosen(measured: Measured, now: str = "") -> Choice:
    """The way that leaves out least among those that are nearly as quick as the quickest.

    Args:
        measured: By all ranks.
        now: The way in use: it stays where another is hardly quicker.
    """
    found = {way: measured.best(way) for way in CANDIDATES}
    seconds = {way: one[1] for way, one in found.items()}
    quickest = min(seconds.values())
    way = next(one for one in CANDIDATES if seconds[one] <= NEARLY * quickest)
    less = now in seconds and CANDIDATES.index(now) < CANDIDATES.index(way)
    if less and seconds[now] <= NEARLY**2 * quickest:
        way = now
    return Choice(way, found[way][0], seconds)
