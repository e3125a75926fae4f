"""Throughput, and where the time went."""

from __future__ import annotations

import time


class Rate:
    """Global samples a second, of the time that was spent on training.

    Attributes:
        value: Samples a second at the last measurement.
        seconds: Time spent on training, without evaluations.
        samples: Global samples in that time.
    """

    def __init__(self) -> None:
        self.value, self.seconds, self.samples = 0.0, 0.0, 0
        self._since = time.perf_counter()
        self._new = 0

    def add(self, samples: int) -> None:
        """Counts the samples of a global step."""
        self._new += samples

    def measure(self) -> float:
        """Samples a second since the last measurement or restart."""
        now = time.perf_counter()
        passed = max(now - self._since, 1e-9)
        self.value = self._new / passed
        self.seconds, self.samples = self.seconds + passed, self.samples + self._new
        self._since, self._new = now, 0
        return self.value

    def restart(self) -> None:
        """Leaves time out that was not spent on training."""
        self._since = time.perf_counter()


def summary(steps: int, samples: int, seconds: float, waited: float, exposed: float | None) -> str:
    """The whole training in one line.

    Args:
        steps, samples: Done in this process's life, over all ranks.
        seconds: Spent on training.
        waited: Seconds of these in which rank 0 waited for data.
        exposed: Part of the rest in which only communication happened; ``None`` if unknown.
    """
    seconds = max(seconds, 1e-9)
    data = min(1.0, waited / seconds)
    parts = [f"waiting for data {data:.0%}"]
    if exposed is not None:
        parts.append(f"communication {exposed * (1 - data):.0%}")
        parts.append(f"computing {(1 - exposed) * (1 - data):.0%}")
    return (
        f"trained {steps:,} steps, {samples:,} samples in {seconds:.1f} s:"
        f" {samples / seconds:,.0f} samples/s ({', '.join(parts)})"
    )
