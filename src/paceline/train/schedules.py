"""Learning rates over the global steps of a training, as a factor of the highest one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.spec.errors import SettingError

NAMES = ("cosine", "linear", "inverse-sqrt", "constant", "step", "plateau")
MILESTONES = (0.5, 0.75)  # of the training, where ``step`` divides by ten
_DIVIDE = 0.1


class Curve:
    """A learning rate's course.

    What it learned on the way is in its ``__dict__``, which torch saves with the schedule; what
    it was made with is in slots, so that a resumed run may have more steps.

    Args:
        name: One of :data:`NAMES`.
        steps: Global steps of the training.
        warm_up: Part of them over which the rate rises from zero.
        milestones: Parts of the training after which ``step`` divides by ten.
        patience: Evaluations without a better value after which ``plateau`` divides by ten.
    """

    __slots__ = ("__dict__", "milestones", "name", "patience", "steps", "warm")

    def __init__(
        self,
        name: str,
        steps: int,
        warm_up: float,
        patience: int = 3,
        milestones: Sequence[float] = MILESTONES,
    ) -> None:
        if name not in NAMES:
            raise SettingError(f"--schedule {name}: unknown", remedy=f"one of {', '.join(NAMES)}")
        self.name, self.steps, self.patience = name, steps, patience
        self.milestones = tuple(milestones)
        self.warm = round(steps * warm_up)
        self.scale, self.best, self.stale = 1.0, math.inf, 0

    def __call__(self, step: int) -> float:
        """Factor of the global step ``step``."""
        if step < self.warm:
            return (step + 1) / self.warm
        if self.name == "inverse-sqrt":
            return math.sqrt(max(self.warm, 1) / (step + 1))
        done = min(1.0, (step - self.warm) / max(1, self.steps - self.warm))
        return self._falling(done)

    def _falling(self, done: float) -> float:
        if self.name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        if self.name == "linear":
            return 1 - done
        if self.name == "step":
            return float(_DIVIDE ** sum(done >= milestone for milestone in self.milestones))
        return self.scale

    def report(self, loss: float) -> None:
        """Takes the loss of an evaluation; only ``plateau`` minds."""
        if self.name != "plateau":
            return
        self.best, self.stale = (loss, 0) if loss < self.best else (self.best, self.stale + 1)
        if self.stale >= self.patience:
            self.scale, self.stale = self.scale * _DIVIDE, 0


def scheduled(optimizer: Optimizer, curve: Curve) -> LambdaLR:
    """The schedule that follows a curve, to be advanced once for each global step."""
    return LambdaLR(optimizer, curve)
