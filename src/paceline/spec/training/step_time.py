"""Model of the time of a training step that averages gradients while it computes. Pure.

``communication="auto"`` chooses a method by it; ``paceline forecast`` predicts and advises by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_FORWARD = 1 / 3  # fraction of computing before the first gradient is ready

BYTES_SENT: Mapping[str, tuple[float, float]] = {
    "fp16": (0.5, 0.5),
    "int8": (0.26, 0.26),
    "int4": (0.13, 0.2),
}
"""Bytes that each method sends, as a fraction of exact float32 averages: with two ranks, and with
more. Ordered from the most to the least exact."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step whose gradients are averaged in equal buckets. All times in seconds.

    Attributes:
        computing: Time of the forward and backward pass.
        moving: Time that the link needs for all bytes.
        buckets: Number of gradient buckets.
        latency: Time per bucket besides that for its bytes.
        blocking: Processor time that messages take from computing.
    """

    computing: float
    moving: float
    buckets: int = 1
    latency: float = 0.0
    blocking: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of the step when each bucket is sent while the next is computed.

        Either the last bucket starts when the last gradient is ready, or the link is busy from the
        first bucket on.
        """
        lead_s, final_bucket_s, busy_link_s = self._parts()
        return lead_s + max(
            final_bucket_s + self.latency, busy_link_s + self.buckets * self.latency
        )

    def latency_from(self, seconds: float) -> float:
        """Returns the latency that explains a measured step time."""
        lead_s, final_bucket_s, busy_link_s = self._parts()
        backward_s = seconds - lead_s
        return max(0.0, min(backward_s - final_bucket_s, (backward_s - busy_link_s) / self.buckets))

    def _parts(self) -> tuple[float, float, float]:
        """Returns the time before the first bucket, then both possible ends without latencies."""
        backward = (1 - _FORWARD) * self.computing
        lead_s = _FORWARD * self.computing + self.blocking
        final_bucket_s = backward + self.moving / self.buckets
        return lead_s, final_bucket_s, backward / self.buckets + self.moving
