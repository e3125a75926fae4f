"""Throughput."""

from __future__ import annotations

import time


class Rate:
    """Global samples a second since the last measurement."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._samples = 0
        self.value = 0.0

    def add(self, samples: int) -> None:
        self._samples += samples

    def measure(self) -> float:
        now = time.perf_counter()
        self.value = self._samples / max(now - self._since, 1e-9)
        self._since, self._samples = now, 0
        return self.value

    def restart(self) -> None:
        """Leaves time out that was not spent on training."""
        self._since, self._samples = time.perf_counter(), 0
