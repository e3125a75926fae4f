"""The base class of gradient reducers, and the buckets and context that they work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from paceline.train.reduce.collectives import Collectives, ReduceContext


@dataclass(slots=True)
class Bucket:
    """Gradients of one backward pass that are averaged together.

    Attributes:
        number: Number in the order in which buckets are sent, from 0.
        flat: This rank's gradients, one-dimensional; :meth:`GradientReducer.all_reduce` makes it
            the mean over all ranks, in place.
        parameters: Parameters of these gradients.
        gradients: Parts of ``flat`` in the same order, with the parameters' shapes.
        is_last: Whether this is the last bucket of the backward pass.
    """

    number: int
    flat: Tensor
    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    is_last: bool


class GradientReducer:
    """Averages gradients over all ranks; made for a :class:`ReduceContext`.

    The methods for state do nothing in this class; reducers with state override them.
    """

    name: ClassVar[str]

    def __init__(self, context: ReduceContext, collectives: Collectives | None = None) -> None:
        raise NotImplementedError

    def all_reduce(self, bucket: Bucket) -> None:
        """Makes ``bucket.flat`` the mean over all ranks: the same bits on every rank.

        Called in bucket order, on every rank; on CPUs in a thread of its own, on an accelerator
        within a stream of its own.
        """
        raise NotImplementedError

    def bytes_sent(self, elements: int, ranks: int) -> int:
        """Returns the bytes that a rank sends for so many elements of gradients."""
        raise NotImplementedError

    def commit(self) -> None:
        """Commits the last pass: the optimizer has stepped with its means."""

    def rollback(self) -> None:
        """Undoes the last pass, which does not count; only if the context's ``can_roll_back``."""

    def adopt(self, other: GradientReducer) -> None:
        """Takes over the state of another reducer, also one of another number of ranks."""

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, by parameter name; a collective."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Loads a state of :meth:`state`, also one of another world size."""

    def replicated_state(self) -> dict[str, Any]:
        """Returns the part of :meth:`state` that is the same on every rank; no collective."""
        return {}

    def load_replicated_state(self, state: dict[str, Any]) -> None:
        """Loads a state of :meth:`replicated_state`; this rank's residuals stay."""
