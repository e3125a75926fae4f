"""Steps apart, and a mean now and then: DiLoCo (Douillard and others, 2023).

Each rank steps with its own gradients. After some steps the ranks send each other how far they have
come, in 8 bits, and an outer optimizer with Nesterov's momentum takes the mean for a gradient. What
that costs in loss is told when the training begins: it is never taken without being asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.train.communication.int8 import Int8
from paceline.train.communication.wire import Wire
from paceline.train.exchange import Bucket, Line, Method

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
    """

    name: ClassVar[str] = "local"

    def __init__(self, line: Line, wire: Wire | None = None) -> None:
        self.number, self.first = STEPS, 1 << 62
        self.rate, self.momentum = 0.9, 0.5
        self._wire = wire or Wire(line)
        self._parameters = [(name, p) for p, name in line.names.items() if p.requires_grad]
        # A lost rank takes a model with it, and all begin again: no pass is void.
        counting = replace(line, void=False)
        self._gradients, self._ways = Int8(counting, self._wire), Int8(counting, self._wire)
        self._steps = self._apart = 0
        self._before: dict[str, Tensor] = {}  # where all were when they last met
        self._moving: dict[str, Tensor] = {}  # the outer momentum
        self._stale = False  # moments differ between ranks

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

    def average(self, bucket: Bucket) -> None:
        together = self._steps < self.first
        self._steps += bucket.last
        if together:
            self._gradients.average(bucket)
            return
        if not self._before:
            self._before = {name: one.detach().clone() for name, one in self._parameters}
        self._apart += bucket.last
        self._stale = True

    @property
    def due(self) -> bool:
        """Whether the ranks have been apart for long enough."""
        return self._apart >= self.number

    @torch.no_grad()
    def synchronise(self, buffers: Iterable[Tensor] = ()) -> None:
        """Brings parameters and buffers of all ranks together, where they are apart."""
        if not self._apart:
            return
        self._apart = 0
        for number, group in enumerate(self._groups()):
            self._meet(number, group)
        for one in buffers:
            self._mean(one)

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

    def _meet(self, number: int, group: list[tuple[str, Tensor]]) -> None:
        """One outer step. Single roundings only: so it is the same on different processors."""
        ways = [(self._before[name] - one).reshape(-1) for name, one in group]
        flat = torch.cat(ways)
        sizes = [one.numel() for _, one in group]
        parts = [
            part.view(one.shape)
            for part, (_, one) in zip(torch.split(flat, sizes), group, strict=True)
        ]
        owners = [cast(nn.Parameter, one) for _, one in group]
        bucket = Bucket(number, flat, owners, parts, False)
        self._ways.average(bucket)
        for (name, one), way in zip(group, parts, strict=True):
            known = self._moving.get(name)
            moving = torch.zeros_like(way) if known is None else known.to(way.device)
            self._moving[name] = moving
            moving.mul_(self.momentum).add_(way)
            step = moving.mul(self.momentum).add_(way).mul_(self.rate)
            one.copy_(self._before[name].sub_(step))

    def _mean(self, buffer: Tensor) -> None:
        if not buffer.numel():
            return
        if buffer.is_floating_point():
            wide = buffer.float() if buffer.dtype != torch.float64 else buffer.clone()
            wide /= self._wire.ranks
            self._wire.sum(wide)
            buffer.copy_(wide)
        else:
            raw = buffer.contiguous().reshape(-1).view(torch.uint8)
            self._wire.from_first(raw)
            buffer.copy_(raw.view(buffer.dtype).reshape(buffer.shape))

    @torch.no_grad()
    def share_moments(self, optimizer: Optimizer) -> None:
        """Gives all ranks the mean of their optimizers' moments: a checkpoint holds only one."""
        if not self._stale:
            return
        self._stale = False
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for _, kept in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(kept, Tensor) and kept.shape == parameter.shape:
                        self._mean(kept)

    def counted(self) -> None:
        pass

    def void(self) -> None:
        pass

    def follow(self, other: Method) -> None:
        if isinstance(other, Local):
            self.take_alike(other.alike())
            self._gradients.follow(other._gradients)
            self._ways.follow(other._ways)

    def state(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "momentum": dict(self._moving),
            "gradients": self._gradients.state(),
            "ways": self._ways.state(),
        }

    def alike(self) -> dict[str, Any]:
        return {"steps": self._steps, "momentum": dict(self._moving)}

    def take_alike(self, state: dict[str, Any]) -> None:
        self._steps, self._apart, self._before = state.get("steps", 0), 0, {}
        self._moving = dict(state.get("momentum", {}))

    def load_state(self, state: dict[str, Any]) -> None:
        self._steps, self._apart, self._before = state.get("steps", 0), 0, {}
        self._moving = dict(state.get("momentum", {}))
        self._gradients.load_state(state.get("gradients", {}))
        self._ways.load_state(state.get("ways", {}))

    def sent(self, elements: int, ranks: int) -> int:
        each = self._gradients.sent(elements, ranks)
        return each if self._steps < self.first else each // self.number
