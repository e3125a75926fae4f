"""Backward and the optimizer's step: loss scale, clipping, schedule."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Updater:
    """What happens between a loss and new parameters.

    Args:
        module: Its parameters' gradients are clipped.
        optimizer: Steps.
        schedule: Advanced once for each step.
        scaler: Loss scale of fp16; ``None`` where none is needed.
        clip_norm: Largest norm of the whole gradient; ``None`` does not clip.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        scaler: torch.amp.GradScaler | None,
        clip_norm: float | None,
    ) -> None:
        self._module, self.optimizer, self.schedule = module, optimizer, schedule
        self.scaler, self._clip = scaler, clip_norm

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradient."""
        scaled = self.scaler.scale(loss) if self.scaler else loss
        scaled.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Steps and clears the gradient."""
        if self._clip is not None:
            self._clip_gradient(self._clip)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()

    def _clip_gradient(self, norm: float) -> None:
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self._module.parameters(), norm)
