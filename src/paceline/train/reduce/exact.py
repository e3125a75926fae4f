"""Exact averages of gradients: DDP's own arithmetic, to the bit, except for small models."""

from __future__ import annotations

from typing import ClassVar

from paceline.train.reduce.collectives import Collectives, ReduceContext
from paceline.train.reduce.reducer import Bucket, GradientReducer


class Exact(GradientReducer):
    """All-reduces each bucket, divided by the number of ranks first, as DDP does.

    Args:
        is_small: Uses small messages (``reduce/small_messages.py``). Decided for the whole model,
            not for a bucket, as the sum must not depend on how gradients are divided.
        is_pair: Two ranks send each other all gradients over direct connections
            (``reduce/direct.py``). They send as many bytes as over gloo, and the sum is the same.
    """

    name: ClassVar[str] = "exact"

    def __init__(
        self,
        context: ReduceContext,
        collectives: Collectives | None = None,
        *,
        is_small: bool = False,
        is_pair: bool = False,
    ) -> None:
        self._collectives = collectives or Collectives(context)
        self._element_bytes = context.element_bytes
        self._is_small, self._is_pair = is_small, is_pair and context.world_size == 2

    def all_reduce(self, bucket: Bucket) -> None:
        if self._is_pair:
            self._collectives.average_pair(bucket.flat)
            return
        bucket.flat.mul_(1.0 / self._collectives.world_size)
        if self._is_small:
            self._collectives.all_reduce(bucket.flat)
        else:
            self._collectives.ring_all_reduce(bucket.flat)

    def bytes_sent(self, elements: int, ranks: int) -> int:
        return int(2 * (ranks - 1) * self._element_bytes * elements / ranks)
