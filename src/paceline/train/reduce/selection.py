"""The choice of ``auto`` among ways to communicate, from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.spec.formatting import format_duration
from paceline.spec.training.step_time import BYTES_SENT, StepTime

CANDIDATES = ("exact", *BYTES_SENT)
"""From the least to the most that is left out. No other is taken without being asked for."""
NEARLY = 1.05
"""So near to the quickest, the way that leaves out less is taken."""
_BUCKETS = (1, 2, 4, 8, 16)
_AS_QUICK = 1.03  # so near to the quickest, fewer buckets are taken
_LEAST_BUCKET = 1 << 16  # bytes


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
        each: Seconds that a bucket of codes takes beyond its latency, its bytes and their coding:
            who codes and sends waits for a processor that computes, on every rank.
        handling: Seconds for which a processor that would compute handles a byte that is sent,
            and one that comes; 0 where there is one to spare.
    """

    computing: float
    gradients: int
    latency: float
    rate: float
    sent: Mapping[str, int]
    coding: Mapping[str, float]
    each: float = 0.0
    handling: float = 0.0

    def step(self, way: str, buckets: int) -> StepTime:
        """A step in so many buckets."""
        latency = self.latency if way == "exact" else self.latency + self.each
        moving = self.sent[way] / self.rate
        return StepTime(self.computing, moving, buckets, latency, self.own(way))

    def seconds(self, way: str, buckets: int) -> float:
        """Of such a step."""
        return self.step(way, buckets).seconds

    def own(self, way: str) -> float:
        """Seconds that a processor has to do with messages, and does not compute."""
        return self.coding[way] + self.handling * self.sent[way]

    def corrected(self, way: str, buckets: int, seconds: float) -> Measured:
        """With what is known since a step by codes took so many seconds."""
        latency = self.step(way, buckets).latency_from(seconds)
        return replace(self, each=max(0.0, latency - self.latency))

    def best(self, way: str) -> tuple[int, float]:
        """Into how many buckets gradients are best divided, and the seconds of a step then."""
        most = max(1, self.gradients // _LEAST_BUCKET)
        every = {one: self.seconds(way, one) for one in _BUCKETS if one <= most}
        least = min(every.values())
        found = min(one for one, seconds in every.items() if seconds <= _AS_QUICK * least)
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
            f"{name} {format_duration(one)}"
            for name, one in self.seconds.items()
            if name != self.way
        )
        line = measured.sent["exact"] / measured.rate
        return (
            f"{self.way}, by which a step takes about {format_duration(self.seconds[self.way])}"
            f" ({others}): computing takes {format_duration(measured.computing)}, and"
            f" {measured.sent['exact'] / 1e6:.1f} MB of gradients {format_duration(line)}"
            f" at {measured.rate * 8e-6:,.0f} Mbit/s"
        )


def chosen(measured: Measured, now: str = "", off: Mapping[str, float] | None = None) -> Choice:
    """The way that leaves out least among those that are nearly as quick as the quickest.

    Args:
        measured: By all ranks.
        now: The way in use: it stays where another is hardly quicker.
        off: By way how many times as long as was forecast its steps took, where they were seen.
    """
    found = {way: measured.best(way) for way in CANDIDATES}
    seconds = {way: one[1] * (off or {}).get(way, 1.0) for way, one in found.items()}
    quickest = min(seconds.values())
    way = next(one for one in CANDIDATES if seconds[one] <= NEARLY * quickest)
    less = now in seconds and CANDIDATES.index(now) < CANDIDATES.index(way)
    if less and seconds[now] <= NEARLY**2 * quickest:
        way = now
    return Choice(way, found[way][0], seconds)
