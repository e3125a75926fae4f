"""How long a training step takes: computing, and gradients that are averaged beside it. Pure.

The one model of a step: ``communication="auto"`` chooses by it, and ``paceline forecast`` predicts
and advises by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_FORWARD = 1 / 3  # part of computing in which no gradient is ready

BYTES_SENT: Mapping[str, tuple[float, float]] = {
    "fp16": (0.5, 0.5),
    "int8": (0.26, 0.26),
    "int4": (0.13, 0.2),
}
"""Bytes that each way sends, as a part of those of exact float32 averages: between two ranks, and
among more. From the one that leaves out least on."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step whose gradients are averaged in equal buckets. All times in seconds.

    Attributes:
        computing: Of forward and backward pass.
        moving: For which the link is busy with all bytes.
        buckets: Number of parts in which gradients are sent.
        latency: Of a bucket, besides its bytes.
        blocking: For which messages keep the processor from computing.
    """

    computing: float
    moving: float
    buckets: int = 1
    latency: float = 0.0
    blocking: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the step, where a bucket is sent while the gradients of the next are computed.

        Either the last gradient has to be waited for and then its bucket, or the link is always
        busy from the first bucket on.
        """
        before, last_bucket, busy_link = self._parts()
        return before + max(last_bucket + self.latency, busy_link + self.buckets * self.latency)

    def latency_from(self, seconds: float) -> float:
        """The latency with which a step takes so long."""
        before, last_bucket, busy_link = self._parts()
        rest = seconds - before
        return max(0.0, min(rest - last_bucket, (rest - busy_link) / self.buckets))

    def _parts(self) -> tuple[float, float, float]:
        """Before anything is sent, and without latencies the two ends of which the later counts."""
        backward = (1 - _FORWARD) * self.computing
        before = _FORWARD * self.computing + self.blocking
        last_bucket = backward + self.moving / self.buckets
        return before, last_bucket, backward / self.buckets + self.moving
