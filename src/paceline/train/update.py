"""Updates one model with a loss, and averages its weights: backward pass, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import get_ema_multi_avg_fn

from paceline.spec.errors import SettingError
from paceline.train import hyperparameters, parallel
from paceline.train.comms import Comms
from paceline.train.data.loader import Batch
from paceline.train.elastic.recovery import Recovery
from paceline.train.measure.watch import Norms
from paceline.train.reduce.choice import Communication
from paceline.train.reduce.exchange import GradientExchange


def per_sample_losses(losses: Tensor, samples: int) -> Tensor:
    """Returns one loss for each sample; a mean is repeated for each.

    Raises:
        ValueError: The tensor is neither a mean nor one loss for each sample.
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
    """Returns this rank's loss: its gradient averaged over ranks is that of the global mean."""
    if not batch.count:
        return losses.sum() * 0.0
    return losses[: batch.count].sum() * (ranks / batch.total)


class Updater:
    """Turns a loss into new parameters of one model.

    Attributes:
        model: Model that the script calls: the module itself, or DDP around it.
        pre_step: Called right before the optimizer changes parameters.
        average: Moving average of the weights, updated after each step; ``None`` for none.
        exchange: Exchange of a replica's gradients; ``None`` without a replica.
        communication: Chooses the reducer of that exchange; ``None`` without a replica.
        changed_settings: Hyperparameters that differ from those of the loaded checkpoint, described
            for the user.

    Args:
        scaler: Loss scale of fp16; ``None`` if none is needed.
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
        self.changed_settings: list[str] = []
        self._constructed = hyperparameters.describe_optimizer(optimizer)
        self._recorded: dict[str, Any] | None = None  # the same of the loaded checkpoint
        self._communication_state: dict[str, Any] = {}  # of a checkpoint, while this rank is alone

    def replicate(
        self,
        method: str,
        comms: Comms,
        device: torch.device,
        *,
        unused: bool,
        manual: bool,
        recovery: Recovery | None,
    ) -> None:
        """Averages gradients over all ranks from now on; a collective.

        Args:
            method: Method of averaging, as ``session.prepare`` takes it.
            manual: This is one of several models that are trained together.

        Raises:
            SettingError: Gradients are sparse or complex, or the optimizer has other parameters.
        """
        parallel.check_dense(self.module)
        parallel.check_optimizer(self.module, self.optimizer)
        replica = parallel.replicate(
            self.module, device, comms, unused=unused, manual=manual, recovery=recovery
        )
        self.model, self.exchange = replica, GradientExchange(replica, comms)
        self.communication = Communication(method, self.exchange, comms, self.optimizer)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(
        self, loss: Tensor, inputs: Sequence[Tensor] | None = None, *, retain_graph: bool = False
    ) -> None:
        """Adds the gradient of a loss.

        Args:
            inputs: Parameters that get a gradient; ``None``: all that the loss depends on.
            retain_graph: Keeps the graph for another loss that shares a part of it.
        """
        scaled = self.scaler.scale(loss) if self.scaler else loss
        scaled.backward(inputs=inputs, retain_graph=retain_graph or None)  # type: ignore[no-untyped-call]

    def update(self, *, measured: bool = False) -> dict[str, float]:
        """Clips, steps the optimizer and the schedule, and clears the gradient.

        Args:
            measured: Returns the figures of :class:`Norms` for the step; otherwise none.
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
        """Returns the states of optimizer, schedule, scaler, average and communication.

        A collective if parameters are sharded or ranks have residuals of their own.

        Args:
            assemble: Puts shards together.
            replicated_only: Only the state that is the same on all ranks; no collective.
        """
        optimizer = parallel.optimizer_state(self.module, self.optimizer, assemble=assemble)
        optional = {"average": self.average.state(assemble=assemble)} if self.average else {}
        communication = self.communication
        if communication is None:
            method_state = {} if replicated_only else self._communication_state
        elif replicated_only:
            method_state = communication.replicated_state()
        else:
            method_state = communication.state()
        optional |= {"communication": method_state} if method_state else {}
        return {
            "optimizer": optimizer,
            "hyperparameters": self._constructed,
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
        """Loads a state of :meth:`state`; the module has its weights already.

        A state of a running training (``replicated_only``) is taken with its hyperparameters. After
        any other call :meth:`apply_constructed`.

        Raises:
            SettingError: The state is of another class of optimizer.
        """
        recorded = state.get("hyperparameters")  # older versions did not save it
        if replicated_only:
            self._constructed = recorded or self._constructed
        else:
            self._recorded = recorded
            saved_groups = state["optimizer"]["param_groups"]
            hyperparameters.check_class(self.optimizer, recorded, saved_groups)
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
            if replicated_only:
                self.communication.load_replicated_state(method_state)
            else:
                self.communication.load_state(method_state)
        elif not replicated_only:
            self._communication_state = method_state

    def apply_constructed(self, extras: Iterable[object]) -> None:
        """Sets hyperparameters that were constructed with other values than the checkpoint's.

        Args:
            extras: Further objects that were restored; schedules of the optimizer follow.
        """
        schedules = [part for part in (self.schedule, *extras) if isinstance(part, LRScheduler)]
        self.changed_settings = hyperparameters.apply_changes(
            self.optimizer,
            [schedule for schedule in schedules if schedule.optimizer is self.optimizer],
            self._constructed["groups"],
            None if self._recorded is None else self._recorded["groups"],
        )


class Average:
    """Exponential moving average (EMA) of a module's parameters and floating point buffers.

    ``average = decay * average + (1 - decay) * weights``, computed by torch. Every rank computes
    the same; of a sharded module each averages its own shards. Made by ``session.average``.

    Args:
        decay: From 0 to below 1; 0.999 remembers about the last thousand updates.
        start: Updates after which averaging begins; until then the average is the weights.
        wait_for_copies: Called before weights are exchanged.

    Attributes:
        updates: Updates of the module so far.
        exchanges: How often averages and weights were swapped.

    Raises:
        SettingError: A value is out of range.
    """

    def __init__(
        self,
        module: nn.Module,
        comms: Comms,
        decay: float,
        start: int = 0,
        wait_for_copies: Callable[[], None] = lambda: None,
    ) -> None:
        if not 0 <= decay < 1 or start < 0:
            raise SettingError(
                f"an average of weights with decay {decay} and start {start} cannot be",
                found="the decay lies between 0 and 1, the start is a number of updates",
                remedy="decay=0.999, start=0",
            )
        self.module, self.updates = module, 0
        self._comms, self._start, self._wait_for_copies = comms, start, wait_for_copies
        self._mix = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        parallel.reshard(module)
        self._live = _averaged(module)
        self._averages = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        self._buffers = [name for name, _ in module.named_buffers() if name in self._live]
        self._applied = False
        self.exchanges = 0

    @torch.no_grad()
    def update(self) -> None:
        """Adds the module's current weights; called after each of its optimizer's steps."""
        self.updates += 1
        averages, live = _local(self._averages), _local(self._live)
        if self.updates <= self._start:
            torch._foreach_copy_(averages, live)
            return
        # torch's fast path needs tensors of one dtype
        for dtype in dict.fromkeys(average.dtype for average in averages):
            indexes = [number for number, average in enumerate(averages) if average.dtype == dtype]
            self._mix([averages[n] for n in indexes], [live[n] for n in indexes], None)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Context in which the module has the averaged weights; enter it on every rank.

        Enter it between iterations only: after ``session.step`` of the last batch of an epoch, or
        when ``session.epochs(every=…)`` yields.
        """
        self._wait_for_copies()
        self._exchange()
        self._applied = True
        try:
            if not self._comms.is_alone:
                self._comms.broadcast([self._live[name] for name in self._buffers])
            yield self.module
        finally:
            self._applied = False
            self._exchange()

    @contextmanager
    def suspended(self) -> Iterator[bool]:
        """Context with the module's own weights; yields whether it had averaged ones."""
        if not self._applied:
            yield False
            return
        self._exchange()
        try:
            yield True
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swaps averages and weights in place, so that FSDP and DDP keep their references."""
        self.exchanges += 1
        parallel.reshard(self.module)
        for average, live in zip(_local(self._averages), _local(self._live), strict=True):
            former = live.clone()
            live.copy_(average)
            average.copy_(former)

    def state(self, *, assemble: bool = True) -> dict[str, Any]:
        """Returns the state for a checkpoint; ``assemble`` gathers shards, a collective."""
        tensors = self._averages
        if assemble:
            tensors = {name: parallel.full_tensor(tensor) for name, tensor in tensors.items()}
        return {"updates": self.updates, "tensors": dict(tensors)}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any] | None) -> None:
        """Loads a state of :meth:`state`; ``None`` starts with the current weights."""
        if state is None:
            torch._foreach_copy_(_local(self._averages), _local(self._live))
            self.updates = 0
            return
        self.updates = state["updates"]
        for name, average in self._averages.items():
            parallel.fill_local(average, state["tensors"][name])


def _averaged(module: nn.Module) -> dict[str, Tensor]:
    state = parallel.local_state(module)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: t for name, t in tensors.items() if name in state and t.is_floating_point()}


def _local(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [parallel.local_tensor(tensor.detach()) for tensor in tensors.values()]
