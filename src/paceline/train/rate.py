"""Throughput, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.train.pace import Shares


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


def summary(
    steps: int,
    samples: int,
    seconds: float,
    waited: float,
    shares: Shares | None,
    hosts: Sequence[str] = (),
) -> str:
    """The whole training in one line, and a second one about a rank that holds the others up.

    Args:
        steps, samples: Done in this process's life, over all ranks.
        seconds: Spent on training.
        waited: Seconds of these in which rank 0 waited for data.
        shares: Of all ranks' time; ``None`` where they are not known.
        hosts: Of each rank.
    """
    seconds = max(seconds, 1e-9)
    if shares is None:
        parts = f"waiting for data {min(1.0, waited / seconds):.0%}"
    else:
        parts = (
            f"waiting for data {shares.data:.0%}, waiting for slower ranks {shares.others:.0%},"
            f" communication {shares.exchange:.0%}, computing {shares.computing:.0%}"
        )
    text = (
        f"trained {counted(steps, 'step')}, {counted(samples, 'sample')} in {seconds:.1f} s:"
        f" {samples / seconds:,.0f} samples/s ({parts})"
    )
    if shares is None or shares.slowest is None:
        return text
    itself = f", and waits for its data {shares.its_data:.0%} of the time"
    return (
        f"{text}\nslowest: rank {shares.slowest} on {hosts[shares.slowest]}, for which the others"
        f" wait {shares.late:.3f} s a step{itself if shares.its_data >= 0.1 else ''}"
    )


def counted(number: int, name: str) -> str:
    """``1 step``, ``1,024 steps``."""
    return f"{number:,} {name}{'s' * (number != 1)}"
