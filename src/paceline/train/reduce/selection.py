"""The choice of ``auto`` among methods of averaging, from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.spec.formatting import format_duration
from paceline.spec.training.step_time import BYTES_SENT, StepTime

CANDIDATES = ("exact", *BYTES_SENT)
"""From the least to the largest quantisation error. No other is taken without being asked for."""
TOLERANCE = 1.05
"""So near to the fastest, the method with the smaller error is taken."""
_BUCKET_COUNTS = (1, 2, 4, 8, 16)
_BUCKET_TOLERANCE = 1.03  # so near to the fastest, fewer buckets are taken
_MIN_BUCKET_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the ranks measured: the slowest of them in each.

    Attributes:
        computing_s: Of a step without any exchange.
        gradient_bytes: Of all gradients.
        latency_s: Of a collective of a few bytes.
        bytes_per_s: That a rank can send while it receives as many.
        sent: Bytes that a rank sends in a step, by method.
        coding_s: Of a step for encoding and decoding, by method.
        bucket_s: That a bucket of codes takes beyond its latency, its bytes and their coding: the
            thread that codes and sends waits for a processor that computes, on every rank.
        handling_s: For which a processor that would compute handles a byte that is sent, and one
            that comes; 0 when there is one to spare.
    """

    computing_s: float
    gradient_bytes: int
    latency_s: float
    bytes_per_s: float
    sent: Mapping[str, int]
    coding_s: Mapping[str, float]
    bucket_s: float = 0.0
    handling_s: float = 0.0

    def step(self, method: str, buckets: int) -> StepTime:
        latency_s = self.latency_s if method == "exact" else self.latency_s + self.bucket_s
        moving_s = self.sent[method] / self.bytes_per_s
        processor_s = self.processor_s(method)
        return StepTime(self.computing_s, moving_s, buckets, latency_s, processor_s)

    def processor_s(self, method: str) -> float:
        """Seconds for which a processor has to do with messages, and does not compute."""
        return self.coding_s[method] + self.handling_s * self.sent[method]

    def corrected(self, method: str, buckets: int, seconds: float) -> Measurement:
        """This, with what is known since a step by codes took so many seconds."""
        latency_s = self.step(method, buckets).latency_from(seconds)
        return replace(self, bucket_s=max(0.0, latency_s - self.latency_s))

    def best(self, method: str) -> tuple[int, float]:
        """Into how many buckets gradients are best divided, and the seconds of a step then."""
        max_count = max(1, self.gradient_bytes // _MIN_BUCKET_BYTES)
        by_count = {n: self.step(method, n).seconds for n in _BUCKET_COUNTS if n <= max_count}
        limit = _BUCKET_TOLERANCE * min(by_count.values())
        count = min(n for n, seconds in by_count.items() if seconds <= limit)
        return count, by_count[count]


@dataclass(frozen=True, slots=True)
class Choice:
    """A method, and why it was chosen.

    Attributes:
        buckets: Into how many gradients are divided.
        seconds: Of a step, by method.
    """

    method: str
    buckets: int
    seconds: Mapping[str, float]

    def explain(self, measured: Measurement) -> str:
        times = {name: format_duration(seconds) for name, seconds in self.seconds.items()}
        others = ", ".join(f"{name} {times[name]}" for name in times if name != self.method)
        size = measured.sent["exact"]
        moving = format_duration(size / measured.bytes_per_s)
        return (
            f"{self.method}, with which a step takes about"
            f" {times[self.method]} ({others}): computing takes"
            f" {format_duration(measured.computing_s)}, and {size / 1e6:.1f} MB of gradients"
            f" {moving} at {measured.bytes_per_s * 8e-6:,.0f} Mbit/s"
        )


def choose(
    measured: Measurement, present: str = "", slowdown: Mapping[str, float] | None = None
) -> Choice:
    """The method with the smallest error among those that are nearly as fast as the fastest.

    Args:
        present: The method in use: it stays unless another is clearly faster.
        slowdown: How many times as long as forecast steps took, by method, as far as seen.
    """
    best = {method: measured.best(method) for method in CANDIDATES}
    factors = slowdown or {}
    seconds = {method: best[method][1] * factors.get(method, 1.0) for method in CANDIDATES}
    fastest = min(seconds.values())
    method = next(name for name in CANDIDATES if seconds[name] <= TOLERANCE * fastest)
    is_finer = present in seconds and CANDIDATES.index(present) < CANDIDATES.index(method)
    if is_finer and seconds[present] <= TOLERANCE**2 * fastest:
        method = present
    return Choice(method, best[method][0], seconds)
