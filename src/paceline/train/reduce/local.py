"""Local steps, and a mean now and then: DiLoCo (Douillard and others, 2023).

Each rank steps with its own gradients. After some steps the ranks average how far their parameters
have moved, in 8 bits, and an outer optimizer with Nesterov's momentum takes the mean for a
gradient. No local step is void when a rank is lost
(``docs/explanation/decisions/0023-local-steps-are-outside-the-operation-count.md``): a
synchronisation writes nothing but the results of whole operations into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.train.comms import Comms
from paceline.train.reduce.coded_reducer import Int8
from paceline.train.reduce.collectives import Collectives, ReduceContext
from paceline.train.reduce.reducer import Bucket, GradientReducer
from paceline.train.world import World

LOCAL_STEPS = 10
"""Between two synchronisations, unless another number is given."""
AVERAGED_PART = 0.1
"""Part of the training at whose beginning gradients are averaged (in 8 bits)."""
_GROUP_ELEMENTS = 1 << 22  # that are sent together
_MOMENTUM_MEANS = 18  # in the whole training, for each mean that the momentum remembers

ParameterList = list[tuple[str, Tensor]]


class Local(GradientReducer):
    """Each rank steps by itself; :meth:`synchronise` brings the ranks together.

    Attributes:
        local_steps: Between two synchronisations.
        first_local: Steps of the whole training with averaged gradients.
        rate, momentum: Of the outer optimizer.
        unsynced_steps: Steps since the ranks were last together.
        comms: Of all ranks, if one of them may be lost.
    """

    name: ClassVar[str] = "local"

    def __init__(self, context: ReduceContext, collectives: Collectives | None = None) -> None:
        self.local_steps, self.first_local = LOCAL_STEPS, 1 << 62
        self.rate, self.momentum = 0.9, 0.5
        self.comms: Comms | None = None
        self._context, self._collectives = context, collectives or Collectives(context)
        self._world: World | None = None  # that it has gone over to, when a rank was lost
        self._parameters: ParameterList = [(name, p) for p, name in context.names.items()]
        self._gradients = Int8(context, self._collectives)
        self._changes = Int8(context, self._collectives)
        self._steps = self.unsynced_steps = self._lost_steps = 0
        self._pending_steps = 0  # that the running pass adds when it counts
        self._synced: dict[str, Tensor] = {}  # parameters where the ranks were last together
        self._velocity: dict[str, Tensor] = {}  # the outer momentum
        self._moments_differ = False  # between ranks

    def set_length(self, steps: int) -> str:
        """Takes the length of the training; returns what is to be told."""
        self.first_local = int(AVERAGED_PART * steps)
        means = max(1, (steps - self.first_local) // self.local_steps)
        # a momentum that remembers a large part of all means never comes to rest
        self.momentum = min(0.9, max(0.0, 1 - _MOMENTUM_MEANS / means))
        self.rate = 0.9 - max(0.0, self.momentum - 0.5) / 2
        return (
            f"after {self.first_local:,} steps together each rank steps alone, {self.local_steps}"
            " steps at a time: this costs loss, 0.05 to 0.1 nats of a language model in our trials;"
            " int8 and int4 cost hardly any"
        )

    # -- steps ---------------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        return self._steps >= self.first_local

    @property
    def begins_local(self) -> bool:
        """The last step with averaged gradients is done."""
        return self._steps == self.first_local > 0

    def all_reduce(self, bucket: Bucket) -> None:
        """Averages gradients at the training's beginning, and later leaves them as they are."""
        if self.is_local:
            self._note_synced()
        else:
            self._gradients.all_reduce(bucket)
        self._pending_steps += bucket.is_last
        if not self._context.can_roll_back:
            self.commit()

    def step_unreduced(self) -> None:
        """The running pass is a local step of which no bucket has come here."""
        self._note_synced()
        self._pending_steps = 1

    def _note_synced(self) -> None:
        if not self._synced:
            self._synced = {name: p.detach().clone() for name, p in self._parameters}

    def commit(self) -> None:
        self._gradients.commit()
        if self._pending_steps and self.is_local:
            self.unsynced_steps += self._pending_steps
            self._moments_differ = True
            if self._world is None:
                self._lost_steps = 0
        elif self._pending_steps:
            self._synced = {}
        self._steps, self._pending_steps = self._steps + self._pending_steps, 0
        if self.begins_local:  # errors of gradients are dropped: none is sent any more
            self._gradients = Int8(self._context, self._collectives)

    def rollback(self) -> None:
        self._gradients.rollback()
        self._pending_steps = 0

    # -- synchronisation ------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        return self.unsynced_steps >= self.local_steps

    @torch.no_grad()
    def synchronise(self, buffers: Iterable[Tensor] = ()) -> None:
        """Brings parameters and buffers of all ranks together, if they differ."""
        if not self.unsynced_steps:
            return
        self._note_synced()
        for number, group in enumerate(self._groups()):
            mean = self._on_all_ranks(partial(self._mean_change, number, group))
            mean = mean.to(group[0][1].device)  # another rank may have sent it
            self._outer_step(group, mean)
            self._changes.commit()
        for buffer in buffers:
            self._average(buffer)
        self.unsynced_steps = 0

    def _on_all_ranks(self, act: Callable[[], Tensor]) -> Tensor:
        """What all ranks get that do this together; repeated when one is lost meanwhile."""
        comms = self.comms
        if comms is None:
            return act()

        def attempt() -> Tensor:
            if comms.stale and self._world is not comms.world:
                self._switch_world(comms.world)
            return act()

        return comms.event(attempt)

    def _switch_world(self, world: World) -> None:
        """Goes on among the ranks that are left, until everything is renewed among them."""
        self._world, self._lost_steps = world, max(self._lost_steps, self.unsynced_steps)
        context = replace(self._context, group=None, rank=world.rank, world_size=world.size)
        former, self._collectives = (self._gradients, self._changes), Collectives(context)
        self._gradients = Int8(context, self._collectives)
        self._changes = Int8(context, self._collectives)
        self._adopt_residuals(*former)

    def _groups(self) -> Iterator[ParameterList]:
        group: ParameterList = []
        elements = 0
        for name, parameter in self._parameters:
            if group and (parameter.dtype != group[0][1].dtype or elements >= _GROUP_ELEMENTS):
                yield group
                group, elements = [], 0
            group.append((name, parameter))
            elements += parameter.numel()
        if group:
            yield group

    def _mean_change(self, number: int, group: ParameterList) -> Tensor:
        """How far the ranks' parameters have moved on average, one-dimensional."""
        self._changes.rollback()  # what was begun with a lost rank
        flat = torch.cat([(self._synced[name] - p).reshape(-1) for name, p in group])
        parameters = [cast(nn.Parameter, parameter) for _, parameter in group]
        self._changes.all_reduce(Bucket(number, flat, parameters, _split(flat, group), False))
        return flat

    def _outer_step(self, group: ParameterList, mean: Tensor) -> None:
        """One outer step. Single roundings only: so it is the same on different processors."""
        for (name, parameter), change in zip(group, _split(mean, group), strict=True):
            former = self._velocity.get(name)
            velocity = torch.zeros_like(change) if former is None else former.to(change.device)
            self._velocity[name] = velocity
            velocity.mul_(self.momentum).add_(change)
            step = velocity.mul(self.momentum).add_(change).mul_(self.rate)
            parameter.copy_(self._synced[name].sub_(step))

    def _average(self, tensor: Tensor) -> None:
        """Makes a tensor the mean over all ranks; whole numbers are those of rank 0."""
        if not tensor.numel():
            return
        flat = self._on_all_ranks(lambda: self._mean(tensor))
        if not tensor.is_floating_point():
            flat = flat.view(tensor.dtype)
        tensor.copy_(flat.view(tensor.shape))

    def _mean(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            wide = tensor if tensor.dtype == torch.float64 else tensor.float()
            flat = wide.reshape(-1) / self._collectives.world_size
        else:
            flat = tensor.reshape(-1).contiguous().view(torch.uint8).clone()
            if self._collectives.rank:  # no rank is through with a sum before all have come to it
                flat.zero_()
        self._collectives.all_reduce(flat)
        return flat

    @torch.no_grad()
    def average_moments(self, optimizer: Optimizer) -> None:
        """Gives all ranks the mean of their optimizers' moments: a checkpoint holds only one."""
        if not self._moments_differ:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for _, moment in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                        self._average(moment)
        self._moments_differ = False

    # -- other ranks ---------------------------------------------------------------------

    @property
    def max_unsynced_steps(self) -> int:
        """Local steps since the last synchronisation when ranks were found to be lost, at most."""
        return max(self.unsynced_steps, self._lost_steps)

    def synced_parameters(self) -> Mapping[str, Tensor]:
        """Parameters where all ranks were last together; empty while they are."""
        return self._synced if self.unsynced_steps else {}

    def adopt(self, other: GradientReducer) -> None:
        if isinstance(other, Local):
            self._steps, self.unsynced_steps = other._steps, other.unsynced_steps
            self._lost_steps, self._moments_differ = other._lost_steps, other._moments_differ
            self._synced, self._velocity = other._synced, other._velocity
            self._adopt_residuals(other._gradients, other._changes)

    def _adopt_residuals(self, gradients: Int8, changes: Int8) -> None:
        self._gradients.adopt(gradients)
        self._changes.adopt(changes)

    def state(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "momentum": dict(self._velocity),
            # a rank that has come later has no errors of gradients
            "gradients": {} if self.is_local else self._gradients.state(),
            "ways": self._changes.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        replicated = {key: state[key] for key in {"steps", "momentum"} & state.keys()}
        self.load_replicated_state(replicated)
        self._gradients.load_state(state.get("gradients", {}))
        self._changes.load_state(state.get("ways", {}))

    def replicated_state(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "momentum": dict(self._velocity),
            "apart": self.unsynced_steps,
            "differ": self._moments_differ,
        }

    def load_replicated_state(self, state: dict[str, Any]) -> None:
        """Takes it; the model's parameters are those of :meth:`synced_parameters`."""
        self._steps, self.unsynced_steps = state.get("steps", 0), state.get("apart", 0)
        self._velocity, self._synced = dict(state.get("momentum", {})), {}
        self._moments_differ, self._pending_steps = state.get("differ", False), 0

    def bytes_sent(self, elements: int, ranks: int) -> int:
        per_step = self._gradients.bytes_sent(elements, ranks)
        return per_step // self.local_steps if self.is_local else per_step


def _split(flat: Tensor, group: ParameterList) -> list[Tensor]:
    parts = torch.split(flat, [parameter.numel() for _, parameter in group])
    return [part.view(p.shape) for part, (_, p) in zip(parts, group, strict=True)]
