"""The lease: a job lives as long as somebody asks for it. Pure."""

from __future__ import annotations

from typing import Optional

ENDING_SHARE = 0.3  # of the lease: what is left for the ranks' own end


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

    def extend(self, now: float) -> None:
        """The launcher said something else: it lives, and the lease begins anew."""
        self._renewed = max(self._renewed, now)

    @property
    def ending_s(self) -> float:
        """Seconds that ranks have for their own end before the lease is over."""
        return float("inf") if self.seconds is None else ENDING_SHARE * self.seconds

    def is_ending(self, now: float) -> bool:
        """True once the last part has begun: what is to be over by the end must be ended now.

        Never before the lease was first renewed.
        """
        return self.seconds is not None and now - self._renewed > self.seconds - self.ending_s
