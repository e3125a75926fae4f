"""Backward and the optimizer's step: loss scale, clipping, schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.train import wrapping


class Updater:
    """What happens between a loss and new parameters.

    Attributes:
        before_step: Called right before the optimizer changes parameters.

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
        self.module, self.optimizer, self.schedule = module, optimizer, schedule
        self.scaler, self._clip = scaler, clip_norm
        self.before_step: Callable[[], None] | None = None

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
        if self.before_step is not None:
            self.before_step()
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
        nn.utils.clip_grad_norm_(self.module.parameters(), norm)

    def state(self, *, whole: bool = True) -> dict[str, Any]:
        """States of optimizer, schedule and scaler; a collective where parameters are sharded."""
        return {
            "optimizer": wrapping.optimizer_state(self.module, self.optimizer, whole=whole),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }

    def load_state(self, state: dict[str, Any], *, whole: bool = True) -> None:
        """Goes on from a state of :meth:`state`."""
        wrapping.load_optimizer_state(self.module, self.optimizer, state["optimizer"], whole=whole)
        if self.schedule and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
