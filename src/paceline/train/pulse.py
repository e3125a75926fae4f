"""A moment, about twice a second, at which all ranks look up from their work together.

Asking everybody after every step whether it was told to stop would cost more than the step of a
small model. So the ranks agree at every beat, with one small reduction, on how many steps there
are to be until the next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from paceline.train.comms import Comms

SECONDS = 0.5
_MOST_STEPS = 64  # steps may become slower at any time: evaluation, a busy disk


@dataclass(frozen=True, slots=True)
class Beat:
    """What any rank wished at a beat."""

    stop: bool
    save: bool


class Pulse:
    """Counts steps until the next beat; every rank must count the same steps.

    Args:
        comms: Of all ranks.
        seconds: Aimed-at time between two beats.
    """

    def __init__(self, comms: Comms, seconds: float = SECONDS) -> None:
        self._comms, self._seconds = comms, seconds
        self._left, self._last, self._counted = 1, 1, 0
        self._since = time.monotonic()

    def tick(self) -> bool:
        """Counts one step; True when a beat is due: every rank must call :meth:`beat` now."""
        self._left -= 1
        self._counted += 1
        return self._left <= 0

    def beat(self, *, stop: bool, save: bool) -> Beat:
        """Tells the others this rank's wishes and learns theirs."""
        now = time.monotonic()
        a_step = (now - self._since) / max(1, self._counted)
        wishes = self._comms.most(torch.tensor([float(stop), float(save), a_step]))
        self._since, self._counted = now, 0
        self._left = self._last = next_beat(wishes[2], self._seconds, self._last)
        return Beat(wishes[0] > 0, wishes[1] > 0)


def next_beat(a_step: float, seconds: float, last: int) -> int:
    """Steps of ``a_step`` seconds until the next beat; at most twice as many as ``last``."""
    return max(1, min(_MOST_STEPS, 2 * last, int(seconds / max(a_step, 1e-9))))
