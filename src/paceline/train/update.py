"""From a loss to new parameters of one model: backward pass, clipping, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.train import parallel
from paceline.train.average import Average
from paceline.train.comms import Comms
from paceline.train.data.loader import Batch
from paceline.train.elastic.recovery import Recovery
from paceline.train.measure.norms import Norms
from paceline.train.reduce.choice import Communication
from paceline.train.reduce.exchange import GradientExchange


def per_sample_losses(losses: Tensor, samples: int) -> Tensor:
    """Returns one loss for each sample; a mean counts for each.

    Raises:
        ValueError: There is neither.
    """
    if losses.dim() == 0:
        return losses.expand(samples)
    if losses.shape != (samples,):
        raise ValueError(
            f"session.step needs one loss for each of the {samples} samples, or their mean,"
            f" not a tensor of shape {list(losses.shape)}"
            ' (reduction="none", and a mean over what belongs to one sample)'
        )
    return losses


def loss_of(losses: Tensor, batch: Batch, ranks: int) -> Tensor:
    """Returns this rank's loss, whose gradient averaged over ranks is that of the mean."""
    if not batch.count:
        return losses.sum() * 0.0
    return losses[: batch.count].sum() * (ranks / batch.total)


class Updater:
    """Turns a loss into new parameters of one model.

    Attributes:
        model: What the script calls; the module itself, or DDP around it.
        pre_step: Called right before the optimizer changes parameters.
        average: Of the weights, brought up to date after each step; ``None`` for none.
        exchange: Of a replica's gradients; ``None`` where there is no replica.
        communication: By which that exchange is done; ``None`` likewise.

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
        self.model = self.module = module
        self.optimizer, self.schedule = optimizer, schedule
        self.scaler, self.clip_norm = scaler, clip_norm
        self.pre_step: Callable[[], None] | None = None
        self.average: Average | None = None
        self.exchange: GradientExchange | None = None
        self.communication: Communication | None = None
        self._communication_state: dict[
            str, Any
        ] = {}  # by the ranks of a checkpoint, where this one is alone

    def replicate(
        self,
        method: str,
        comms: Comms,
        device: torch.device,
        *,
        unused: bool,
        apart: bool,
        recovery: Recovery | None,
    ) -> None:
        """Has gradients averaged over all ranks from now on; a collective.

        Args:
            method: Of averaging, as ``session.prepare`` takes it.
            comms: Of all ranks.
            device: Of this rank.
            unused: Some steps leave parameters without gradient.
            apart: It is one of several models that are trained together.
            recovery: What makes good that a rank is lost; ``None``: nothing does.

        Raises:
            SettingError: Gradients are sparse or complex, or the optimizer has other parameters.
        """
        parallel.check_dense(self.module)
        parallel.check_optimizer(self.module, self.optimizer)
        replica = parallel.replicate(
            self.module, device, comms, unused=unused, manual=apart, recovery=recovery
        )
        self.model, self.exchange = replica, GradientExchange(replica, comms)
        self.communication = Communication(method, self.exchange, comms, self.optimizer)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(
        self, loss: Tensor, inputs: Sequence[Tensor] | None = None, *, retain_graph: bool = False
    ) -> None:
        """Adds the loss's gradient.

        Args:
            loss: A single number.
            inputs: The parameters that get a gradient; ``None``: all that the loss depends on.
            retain_graph: Another loss that shares a part of the way comes after this one.
        """
        scaled = self.scaler.scale(loss) if self.scaler else loss
        scaled.backward(inputs=inputs, retain_graph=retain_graph or None)  # type: ignore[no-untyped-call]

    def update(self, *, measured: bool = False) -> dict[str, float]:
        """Steps and clears the gradient.

        Args:
            measured: Returns what :class:`Norms` says of the step; otherwise nothing.
        """
        if self.scaler and (measured or self.clip_norm is not None):
            self.scaler.unscale_(self.optimizer)
        norms = Norms(self.optimizer) if measured else None
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        if self.pre_step is not None:
            self.pre_step()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.exchange is not None:
            self.exchange.commit()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        if self.average is not None:
            self.average.update()
        return norms.figures() if norms else {}

    def state(self, *, assemble: bool = True, replicated_only: bool = False) -> dict[str, Any]:
        """Returns states of optimizer, schedule, scaler and average.

        A collective where parameters are sharded, and for what ranks have not said yet.

        Args:
            assemble: Puts shards together.
            replicated_only: Only what all ranks have alike: no collective.
        """
        optimizer = parallel.optimizer_state(self.module, self.optimizer, assemble=assemble)
        optional = {"average": self.average.state(assemble=assemble)} if self.average else {}
        if self.communication is not None:
            method_state = (
                self.communication.replicated_state()
                if replicated_only
                else self.communication.state()
            )
        else:
            method_state = {} if replicated_only else self._communication_state
        optional |= {"communication": method_state} if method_state else {}
        return {
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "scaler": self.scaler.state_dict() if self.scaler else None,
            **optional,
        }

    def select_known(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a state of :meth:`state` without an average that is not kept now."""
        has_average = self.average is not None
        return {key: value for key, value in state.items() if has_average or key != "average"}

    def load_state(
        self, state: dict[str, Any], *, assemble: bool = True, replicated_only: bool = False
    ) -> None:
        """Loads a state of :meth:`state`; the module has its weights already."""
        parallel.load_optimizer_state(
            self.module, self.optimizer, state["optimizer"], assemble=assemble
        )
        if self.schedule and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        if self.scaler and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.average:
            self.average.load_state(state.get("average"))
        method_state = state.get("communication", {})
        if self.communication is not None:
            (
                self.communication.load_replicated_state
                if replicated_only
                else self.communication.load_state
            )(method_state)
        elif not replicated_only:
            self._communication_state = method_state
