"""Steps apart, and a mean now and then: DiLoCo (Douillard and others, 2023).

Each rank steps with its own gradients. After some steps the ranks send each other how far they have
come, in 8 bits, and an outer optimizer with Nesterov's momentum takes the mean for a gradient. What
that costs in loss is told when the training begins: it is never taken without being asked for.

Where a lost rank is made good, no step apart is void: it was its rank's own, and who is there meets
when all would have met. What a synchronisation sends goes in operations of
:class:`paceline.train.comms.Comms`, a group of parameters in each. One that a rank is lost in is
done again without it, and nothing but what it gives is written into the model: so all get the same,
also who has it from another.
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
from paceline.train.reduce.collectives import Wire
from paceline.train.reduce.exchange import Bucket, Line, Method
from paceline.train.reduce.int8 import Int8
from paceline.train.world import World

STEPS = 10
"""Steps apart, where nobody says another number."""
TOGETHER = 0.1
"""Part of the training at whose beginning gradients are averaged (in 8 bits)."""
_GROUP = 1 << 22  # elements that are sent together
_HORIZON = 18  # means in the whole training for each that the momentum remembers


class Local:
    """Steps apart; :meth:`synchronise` brings the ranks together.

    Attributes:
        number: Steps apart.
        first: Steps of the whole training with averaged gradients.
        rate, momentum: Of the outer optimizer.
        apart: Steps since the ranks last met.
        comms: Of all ranks, where one of them may be lost.
    """

    name: ClassVar[str] = "local"

    def __init__(self, line: Line, wire: Wire | None = None) -> None:
        self.number, self.first = STEPS, 1 << 62
        self.rate, self.momentum = 0.9, 0.5
        self.comms: Comms | None = None
        self._line, self._wire = line, wire or Wire(line)
        self._world: World | None = None  # that it has gone over to, when a rank was lost
        self._parameters = [(name, p) for p, name in line.names.items()]
        self._gradients, self._ways = Int8(line, self._wire), Int8(line, self._wire)
        self._steps = self.apart = self._missed = 0
        self._passed = 0  # steps that the running pass adds when it counts
        self._before: dict[str, Tensor] = {}  # where all were when they last met
        self._moving: dict[str, Tensor] = {}  # the outer momentum
        self._differ = False  # moments, between ranks

    def begin(self, steps: int) -> str:
        """Says how long the training is; returns what is to be told."""
        self.first = int(TOGETHER * steps)
        means = max(1, (steps - self.first) // self.number)
        # a momentum that remembers a large part of all means never comes to rest
        self.momentum = min(0.9, max(0.0, 1 - _HORIZON / means))
        self.rate = 0.9 - max(0.0, self.momentum - 0.5) / 2
        return (
            f"after {self.first:,} steps together each rank steps alone, {self.number} steps at a"
            " time: this costs loss, 0.05 to 0.1 nats of a language model in our trials;"
            " int8 and int4 cost hardly any"
        )

    # -- steps ---------------------------------------------------------------------------

    @property
    def parted(self) -> bool:
        """The next step is each rank's own: nothing is exchanged in it."""
        return self._steps >= self.first

    @property
    def parting(self) -> bool:
        """The last step together is done."""
        return self._steps == self.first > 0

    def average(self, bucket: Bucket) -> None:
        if self.parted:
            self._depart()
        else:
            self._gradients.average(bucket)
        self._passed += bucket.last
        if not self._line.void:
            self.counted()

    def step_apart(self) -> None:
        """The running pass is a step apart of which no bucket has come here."""
        self._depart()
        self._passed = 1

    def _depart(self) -> None:
        if not self._before:
            self._before = {name: one.detach().clone() for name, one in self._parameters}

    def counted(self) -> None:
        self._gradients.counted()
        if self._passed and self.parted:
            self.apart, self._differ = self.apart + self._passed, True
            if self._world is None:
                self._missed = 0
        elif self._passed:
            self._before = {}
        self._steps, self._passed = self._steps + self._passed, 0
        if self.parting:  # what is left of gradients is never said: none is sent any more
            self._gradients = Int8(self._line, self._wire)

    def void(self) -> None:
        self._gradients.void()
        self._passed = 0

    # -- synchronisation ------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the ranks have been apart for long enough."""
        return self.apart >= self.number

    @torch.no_grad()
    def synchronise(self, buffers: Iterable[Tensor] = ()) -> None:
        """Brings parameters and buffers of all ranks together, where they are apart."""
        if not self.apart:
            return
        self._depart()
        for number, group in enumerate(self._groups()):
            self._go(group, self._all(partial(self._mean_way, number, group)))
            self._ways.counted()
        for one in buffers:
            self._meet(one)
        self.apart = 0

    def _all(self, act: Callable[[], Tensor]) -> Tensor:
        """What all ranks get who do this together; begun again where one is lost meanwhile."""
        comms = self.comms
        if comms is None:
            return act()

        def again() -> Tensor:
            if comms.stale and self._world is not comms.world:
                self._go_over(comms.world)
            return act()

        return comms.event(again)

    def _go_over(self, world: World) -> None:
        """Goes on among those who are left, until everything begins anew among them."""
        self._world, self._missed = world, max(self._missed, self.apart)
        line = replace(self._line, group=None, rank=world.rank, ranks=world.size)
        formers, self._wire = (self._gradients, self._ways), Wire(line)
        self._gradients, self._ways = Int8(line, self._wire), Int8(line, self._wire)
        self._follow(*formers)

    def _groups(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Parameters that are sent together."""
        group: list[tuple[str, Tensor]] = []
        for one in self._parameters:
            alike = not group or one[1].dtype == group[0][1].dtype
            if group and (not alike or sum(p.numel() for _, p in group) >= _GROUP):
                yield group
                group = []
            group.append(one)
        if group:
            yield group

    def _mean_way(self, number: int, group: list[tuple[str, Tensor]]) -> Tensor:
        """How far the ranks have come in the mean, in one row."""
        self._ways.void()  # what was begun with a lost rank
        flat = torch.cat([(self._before[name] - one).reshape(-1) for name, one in group])
        owners = [cast(nn.Parameter, one) for _, one in group]
        self._ways.average(Bucket(number, flat, owners, _parts(flat, group), False))
        return flat

    def _go(self, group: list[tuple[str, Tensor]], mean: Tensor) -> None:
        """One outer step. Single roundings only: so it is the same on different processors."""
        for (name, one), way in zip(group, _parts(mean, group), strict=True):
            known = self._moving.get(name)
            moving = torch.zeros_like(way) if known is None else known.to(way.device)
            self._moving[name] = moving
            moving.mul_(self.momentum).add_(way)
            step = moving.mul(self.momentum).add_(way).mul_(self.rate)
            one.copy_(self._before[name].sub_(step))

    def _meet(self, one: Tensor) -> None:
        """Makes a tensor the mean over all ranks; whole numbers are those of rank 0."""
        if not one.numel():
            return
        row = self._all(lambda: self._mean(one))
        if not one.is_floating_point():
            row = row.view(one.dtype)
        one.copy_(row.view(one.shape))

    def _mean(self, one: Tensor) -> Tensor:
        """In one row; of whole numbers the bytes."""
        if one.is_floating_point():
            wide = one if one.dtype == torch.float64 else one.float()
            row = wide.reshape(-1) / self._wire.ranks
        else:
            row = one.reshape(-1).contiguous().view(torch.uint8).clone()
            if self._wire.rank:  # nobody is through with a sum before all have come to it
                row.zero_()
        self._wire.sum(row)
        return row

    @torch.no_grad()
    def share_moments(self, optimizer: Optimizer) -> None:
        """Gives all ranks the mean of their optimizers' moments: a checkpoint holds only one."""
        if not self._differ:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for _, kept in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(kept, Tensor) and kept.shape == parameter.shape:
                        self._meet(kept)
        self._differ = False

    # -- other ranks ---------------------------------------------------------------------

    @property
    def at_stake(self) -> int:
        """Steps since all last met when ranks were found to be lost, at most."""
        return max(self.apart, self._missed)

    def met(self) -> Mapping[str, Tensor]:
        """Parameters where all ranks last met, by name; empty where they are together."""
        return self._before if self.apart else {}

    def follow(self, other: Method) -> None:
        if isinstance(other, Local):
            self._steps, self.apart, self._missed = other._steps, other.apart, other._missed
            self._differ = other._differ
            self._before, self._moving = other._before, other._moving
            self._follow(other._gradients, other._ways)

    def _follow(self, gradients: Int8, ways: Int8) -> None:
        self._gradients.follow(gradients)
        self._ways.follow(ways)

    def state(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "momentum": dict(self._moving),
            # who has come later has no gradients to tell of
            "gradients": {} if self.parted else self._gradients.state(),
            "ways": self._ways.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.take_alike({name: state[name] for name in ("steps", "momentum") if name in state})
        self._gradients.load_state(state.get("gradients", {}))
        self._ways.load_state(state.get("ways", {}))

    def alike(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "momentum": dict(self._moving),
            "apart": self.apart,
            "differ": self._differ,
        }

    def take_alike(self, state: dict[str, Any]) -> None:
        """The model's parameters are where all last met: see :meth:`met`."""
        self._steps, self.apart = state.get("steps", 0), state.get("apart", 0)
        self._moving, self._before = dict(state.get("momentum", {})), {}
        self._differ, self._passed = state.get("differ", False), 0

    def sent(self, elements: int, ranks: int) -> int:
        each = self._gradients.sent(elements, ranks)
        return each // self.number if self.parted else each


def _parts(flat: Tensor, group: list[tuple[str, Tensor]]) -> list[Tensor]:
    """The parts of a row that belong to these parameters, in their shapes."""
    sizes = [one.numel() for _, one in group]
    return [
        part.view(one.shape) for part, (_, one) in zip(torch.split(flat, sizes), group, strict=True)
    ]
