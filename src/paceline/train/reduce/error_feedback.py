"""What a rank has not said yet of its gradients: added to the next ones (error feedback)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.train.reduce.collectives import Wire
from paceline.train.reduce.exchange import Bucket, Line

_DTYPE = torch.bfloat16  # its own error is a five-hundredth of what is a hundredth of a gradient


@dataclass(slots=True)
class Rests:
    """Of one bucket, or of a parameter that is in none.

    Attributes:
        now: What is left to say.
        then: What will be when the running pass counts; where every pass does, the same memory.
        said: The running pass has written it.
    """

    now: Tensor
    then: Tensor
    said: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter's rest lies."""

    rests: Rests
    size: torch.Size
    stride: tuple[int, ...]
    start: int

    @property
    def own(self) -> Tensor:
        return self.rests.now.as_strided(self.size, self.stride, self.start)


class Kept:
    """The rests of one rank, by parameter; they outlive a new layout of the buckets.

    The mean over all ranks is what the training still has to get: so another number of ranks goes
    on with that mean (:func:`taken_over`). Where a rank may be lost in the middle of a pass, which
    is then void, what that pass left is kept beside what was there before it.

    Args:
        wire: Of all ranks.
        line: Of the method whose rests they are.
    """

    def __init__(self, wire: Wire, line: Line) -> None:
        self._wire, self._names = wire, line.names
        self._twice = line.void
        self._of: dict[str, _Place] = {}
        self._said: list[Rests] = []
        self._device = torch.device("cpu")
        self._loaded: Mapping[str, Tensor] | None = None  # and nothing said since

    def of(self, bucket: Bucket, length: int) -> Rests:
        """Those of a bucket whose layout is new; at least as long as it."""
        flat = torch.zeros(length, dtype=_DTYPE, device=bucket.flat.device)
        rests = Rests(flat, torch.zeros_like(flat) if self._twice else flat)
        start, self._device, self._loaded = bucket.flat.storage_offset(), flat.device, None
        for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
            at = int(gradient.storage_offset() - start)
            place = _Place(rests, gradient.size(), gradient.stride(), at)
            name = self._names[parameter]
            if name in self._of:
                place.own.copy_(self._of[name].own)
            self._of[name] = place
        return rests

    def left(self, rests: Rests) -> None:
        """The running pass has written what these are when it counts."""
        if rests.then is not rests.now and not rests.said:
            rests.said = True
            self._said.append(rests)

    def counted(self) -> None:
        """The running pass counts."""
        said, self._said = self._said, []
        for one in said:
            one.now, one.then, one.said = one.then, one.now, False

    def void(self) -> None:
        """It does not: everything is still to be said that was when it began."""
        said, self._said = self._said, []
        for one in said:
            one.said = False

    def follow(self, other: Kept) -> None:
        """Takes over what this rank had to say on another line, of the same or other ranks."""
        before, ranks = other._wire.ranks, self._wire.ranks
        self._hold({
            name: taken_over(one.own[None], before, ranks) for name, one in other._of.items()
        })  # fmt: skip
        self._device, self._loaded = other._device, other._loaded if before == ranks else None

    def _hold(self, rests: Mapping[str, Tensor]) -> None:
        self._of = {
            name: _Place(Rests(one, one), one.size(), one.stride(), 0)
            for name, one in rests.items()
        }

    def state(self) -> dict[str, Any]:
        """Those of all ranks, on rank 0, by name and then by rank; a collective."""
        if not self._of or self._loaded is not None:
            return dict(self._loaded or {})
        # Of every parameter and in one order: who has come later may have had other buckets.
        shapes = {name: one.shape for one, name in self._names.items()}
        mine = torch.cat([self._own(name, shape) for name, shape in shapes.items()])
        every = self._wire.gather(mine.view(torch.uint8))
        if every is None:
            return {}
        sizes = [shape.numel() for shape in shapes.values()]
        parts = torch.split(every.view(_DTYPE), sizes, dim=1)
        return {
            name: part.reshape(self._wire.ranks, *shape).clone()
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def _own(self, name: str, shape: torch.Size) -> Tensor:
        """This rank's rest of a parameter, in one row."""
        if name not in self._of:
            return torch.zeros(shape.numel(), dtype=_DTYPE, device=self._device)
        # what a checkpoint had and no bucket has had since is still where it was read
        return self._of[name].own.reshape(-1).to(self._device)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state of :meth:`state`, the same on every rank."""
        self._loaded, wire = dict(state), self._wire
        self._hold({
            name: taken_over(rows[wire.rank, None], wire.ranks, wire.ranks)
            if len(rows) == wire.ranks
            else taken_over(rows, len(rows), wire.ranks, among=wire.ranks)
            for name, rows in state.items()
        })  # fmt: skip


def taken_over(rows: Tensor, before: int, ranks: int, *, among: int = 1) -> Tensor:
    """What one of ``ranks`` has to say in the place of some of ``before``: the mean stays.

    Args:
        rows: Rests of those whose place it takes, shape ``[n, …]``: its own, or of all of them
            where nobody has one of its own. Who takes nobody's begins with nothing.
        before: Ranks that had rests.
        ranks: That go on with them.
        among: So many take these rows together, each an equal part.
    """
    if before == ranks and len(rows) == among == 1:
        return rows[0].clone()
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return (rows.to(wide).sum(0) * (ranks / (before * among))).to(rows.dtype)


def used(flat: Tensor, spans: Sequence[slice]) -> Tensor:
    """Whether this rank has a gradient of each of these parameters: 1, or 0; shape ``[n]``."""
    if not spans:
        return flat[:0]
    return torch.stack([flat[span].any() for span in spans]).to(flat.dtype)


def hold_back(left: Tensor, rests: Rests, spans: Sequence[slice], used: Tensor) -> None:
    """Leaves all to say, as before, of parameters that no rank has used.

    DDP gives their mean to nobody: what was sent of them is not said.

    Args:
        left: Of the whole bucket, if all counts.
        rests: What there was to say of it, before this pass.
        spans: Of parameters that a step may leave unused.
        used: More than 0 for each that some rank has used.
    """
    for span, one in zip(spans, used, strict=True):
        left[span] = torch.where(one > 0, left[span], rests.now[span].to(left.dtype))


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether these are the same parameters, in the same order."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
