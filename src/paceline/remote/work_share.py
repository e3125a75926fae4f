"""Limits the share of the event loop's time that the frames of one host take."""

MAX_SHARE = 0.5
MAX_WORK_S = 0.05  # of work in excess of the share, before other tasks run
MAX_PAUSE_S = 0.5  # a frame takes longer only if this process or its disk was stopped


class WorkShare:
    """Decides when the frames of a host must wait. Pure: callers give the times."""

    def __init__(self) -> None:
        self._paid_at = float("-inf")  # when the work until now is within the share

    def pause_s(self, started_at: float, now: float) -> float:
        """Records work; returns for how many seconds the host's next frames must wait."""
        paid_at = max(self._paid_at, started_at) + (now - started_at) / MAX_SHARE
        self._paid_at = min(paid_at, now + MAX_PAUSE_S)
        pause_s = self._paid_at - now
        return pause_s if pause_s > MAX_WORK_S else 0.0
