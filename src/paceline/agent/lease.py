"""The lease: a job lives as long as somebody asks for it. Pure."""

from __future__ import annotations

from typing import Optional


class Lease:
    """Renewed by the launcher; once it has run out, no process of the job may be left.

    All times are seconds of the node's monotonic clock, so a wrong wall clock does no harm.
    """

    def __init__(self) -> None:
        self.seconds: Optional[float] = None
        self._renewed = 0.0

    def renew(self, seconds: float, now: float) -> None:
        """Extends the lease to ``now + seconds``."""
        self.seconds = seconds
        self._renewed = now

    def expired(self, now: float) -> bool:
        """True once the lease has run out; never before it was first renewed."""
        return self.seconds is not None and now - self._renewed > self.seconds
