"""What every way of averaging gradients is: the protocol between the exchange and its reducers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(slots=True)
class Bucket:
    """Gradients of one backward pass that are averaged together.

    Attributes:
        number: 0, 1, … in the order in which they are sent.
        flat: This rank's gradients, one-dimensional; :meth:`GradientReducer.all_reduce` makes it
            the mean over all ranks, in place.
        parameters: Whose gradients they are.
        gradients: Parts of ``flat`` in the same order, with the parameters' shapes.
        is_last: No other bucket comes after it in this backward pass.
    """

    number: int
    flat: Tensor
    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    is_last: bool


@dataclass(frozen=True, slots=True)
class ReduceContext:
    """The ranks and parameters that a reducer is made for.

    Attributes:
        group: Its own: no other collectives come in between. ``None`` is the whole job's.
        rank: Of this process in the group.
        world_size: Ranks of the group.
        names: Name of each parameter, by which a checkpoint holds residuals.
        can_roll_back: A pass may turn out not to count: ranks may be lost in the middle of it.
        has_unused: A pass may leave parameters without gradient on every rank; DDP drops their
            mean.
        element_bytes: Of the gradients, on average.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    names: Mapping[Tensor, str] = field(default_factory=dict)
    can_roll_back: bool = False
    has_unused: bool = False
    element_bytes: float = 4.0


class GradientReducer:
    """Averages gradients over all ranks; made for a :class:`ReduceContext`.

    The methods for state do nothing here, as for a reducer that keeps none.
    """

    name: ClassVar[str]

    def all_reduce(self, bucket: Bucket) -> None:
        """Makes ``bucket.flat`` the mean over all ranks: the same bits on every rank.

        Called in bucket order, on every rank; on CPUs in a thread of its own, on an accelerator
        within a stream of its own.
        """
        raise NotImplementedError

    def bytes_sent(self, elements: int, ranks: int) -> int:
        """Bytes that a rank sends for so many elements of gradients."""
        raise NotImplementedError

    def commit(self) -> None:
        """The last pass counts: the optimizer has stepped with its means."""

    def rollback(self) -> None:
        """The last pass does not count; only when the context says that this may be."""

    def adopt(self, other: GradientReducer) -> None:
        """Goes on where another reducer stopped, also one of another number of ranks."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold, by parameter name; a collective."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes a state of :meth:`state`, also one of another world size."""

    def replicated_state(self) -> dict[str, Any]:
        """The part of :meth:`state` that is the same on every rank; no collective."""
        return {}

    def load_replicated_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`replicated_state` gave; this rank's residuals stay."""
