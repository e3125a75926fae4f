"""What a rank has not said yet of its gradients: added to the next ones (error feedback)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.train.communication.wire import Wire
from paceline.train.exchange import Bucket


class Kept:
    """The rests of one rank, by parameter; they outlive a new layout of the buckets.

    The mean over all ranks is what the training still has to get: so another number of ranks goes
    on with that mean on each of them.

    Args:
        wire: Of all ranks.
        names: Of each parameter.
        kind: In which they are kept. Of codes bfloat16 will do: its own error is a five-hundredth
            of what is a hundredth of a gradient.
    """

    def __init__(
        self, wire: Wire, names: Mapping[Tensor, str], kind: torch.dtype = torch.bfloat16
    ) -> None:
        self._wire, self._names, self._kind = wire, names, kind
        self._of: dict[str, Tensor] = {}
        self._device = torch.device("cpu")
        self._loaded: Mapping[str, Tensor] | None = None  # and nothing said since

    def of(self, bucket: Bucket, length: int) -> Tensor:
        """One tensor for a bucket whose layout is new; at least as long as it."""
        flat = torch.zeros(length, dtype=self._kind, device=bucket.flat.device)
        start, self._device, self._loaded = bucket.flat.storage_offset(), flat.device, None
        for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
            at = gradient.storage_offset() - start
            own = flat.as_strided(gradient.size(), gradient.stride(), at)
            name = self._names[parameter]
            if name in self._of:
                own.copy_(self._of[name])
            self._of[name] = own
        return flat

    def state(self) -> dict[str, Any]:
        """Those of all ranks, on rank 0, by name and then by rank; a collective."""
        if not self._of or self._loaded is not None:
            return dict(self._loaded or {})
        # what a checkpoint had and no bucket has had since is still where it was read
        mine = torch.cat([one.reshape(-1).to(self._device) for one in self._of.values()])
        every = self._wire.gather(mine.view(torch.uint8))
        if every is None:
            return {}
        sizes = [one.numel() for one in self._of.values()]
        parts = torch.split(every.view(self._kind), sizes, dim=1)
        shapes = [one.shape for one in self._of.values()]
        return {
            name: part.reshape(self._wire.ranks, *shape).clone()
            for name, part, shape in zip(self._of, parts, shapes, strict=True)
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state of :meth:`state`, the same on every rank."""
        self._loaded = dict(state)
        self._of = {
            name: rows[self._wire.rank].clone()
            if len(rows) == self._wire.ranks
            else rows.float().mean(0).to(rows.dtype)
            for name, rows in state.items()
        }


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether these are the same parameters, in the same order."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
