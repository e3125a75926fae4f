"""The lease: the job lives as long as its launcher renews it. Pure."""

from __future__ import annotations

from typing import Optional

ENDING_SHARE = 0.3  # of the lease: what is left for the ranks' own end


class Lease:
    """Renewed by the launcher; when it has run out, no process of the job may be left.

    All times are seconds of the node's monotonic clock.
    """

    def __init__(self) -> None:
        self.seconds: Optional[float] = None
        self._renewed = 0.0

    def renew(self, seconds: float, now: float) -> None:
        """Extends the lease to ``now + seconds``."""
        self.seconds = seconds
        self._renewed = now

    def extend(self, now: float) -> None:
        """Restarts the lease: the launcher has sent something else."""
        self._renewed = max(self._renewed, now)

    @property
    def ending_s(self) -> float:
        """Seconds at the lease's end that are reserved for ending the ranks."""
        return float("inf") if self.seconds is None else ENDING_SHARE * self.seconds

    def is_ending(self, now: float) -> bool:
        """Whether the ranks must be ended now. Never before the first renewal."""
        return self.seconds is not None and now - self._renewed > self.seconds - self.ending_s
