"""Frees a computing thread whose wait outlives the connections that it waits on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.train.elastic import waits
from paceline.train.elastic.connections import GlooConnections

STUCK_S = 3.0
"""Idle in a collective whose connections are cut, after which a rank is reported as stuck."""
_IDLE_SHARE = 0.03  # of a CPU, below which a process does not compute, on a busy machine neither
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.02, 0.5  # between two looks
_CHECKS = 3  # at gloo asleep, with all its connections closed: what waits now waits for nothing
_MAX_CHECKS = 20  # in more than a second; a connection that is not closed even then is not gloo's
_MAX_WAIT_S = 10.0  # after which no look is needed: a thread of gloo's may never sleep (gloo.py)


class CollectiveSpan:
    """Context of code that may wait for other ranks; another thread sees whether it is entered."""

    def __init__(self) -> None:
        self._entries, self._depth = 0, 0

    def __enter__(self) -> None:
        self._entries += not self._depth
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    @property
    def number(self) -> int:
        """Number of the span that is entered now, from 1; 0: none is."""
        return self._entries if self._depth else 0

    def is_idle_for(self, seconds: float, is_finished: Callable[[], bool]) -> bool:
        """Whether this process stays in one span and computes nothing for so long.

        Watches until then, or until ``is_finished``; call it in a thread of its own. CPU time of
        gloo's threads does not count as computing.
        """
        number, cpu_s, idle_from = self.number, _computing_s(), time.monotonic()
        while not is_finished():
            time.sleep(seconds / 12)
            current, used_s = time.monotonic(), _computing_s()
            is_busy = used_s - cpu_s > _IDLE_SHARE * seconds
            if not self.number or self.number != number or is_busy:
                number, cpu_s, idle_from = self.number, used_s, current
            elif current - idle_from >= seconds:
                return True
        return False


def _computing_s() -> float:
    """Returns the CPU seconds that this process has used, without those of gloo's threads."""
    return time.process_time() - waits.gloo_cpu_s()


def release_waits(
    is_finished: Callable[[], bool], connections: GlooConnections, forming: threading.Lock
) -> None:
    """Cancels waits whenever gloo has closed the cut connections and sleeps, until finished.

    Args:
        is_finished: Whether the next group is there, or is superseded.
        forming: Held while a group becomes the present one, so that waits in the next group are not
            cancelled.
    """
    checks, interval_s = 0, _MIN_INTERVAL_S
    deadline = time.monotonic() + _MAX_WAIT_S
    while not is_finished():
        time.sleep(interval_s)
        interval_s = min(_MAX_INTERVAL_S, 1.1 * interval_s)  # looking must not pass for computing
        checks = checks + 1 if waits.is_gloo_asleep() else 0
        is_ready = checks >= (_CHECKS if connections.all_closed() else _MAX_CHECKS)
        if not is_ready and time.monotonic() < deadline:
            continue
        with forming:
            if not is_finished():
                waits.cancel_all()
        checks = 0
