"""Batches of samples of similar length: less padding, and still an order that no rank decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.train.order import Ids, Order, permutation

POOL = 50
"""Batches whose samples are sorted by length together."""


@dataclass
class LengthGrouped(Order):
    """Shuffled pools, sorted inside, cut into batches that are shuffled again.

    A pure function of seed and epoch like every order, so the same at any world size.

    Attributes:
        lengths: Of each sample, shape ``[size]``.
        batch: Samples of a global batch.
    """

    lengths: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    batch: int = 1

    def _make(self, epoch: int) -> Ids:
        ids = super()._make(epoch)
        if not self.shuffle:
            return ids
        step = self.batch * POOL
        pools = [ids[start : start + step] for start in range(0, len(ids), step)]
        ordered = np.concatenate([p[np.argsort(self.lengths[p], kind="stable")] for p in pools])
        whole = len(ids) // self.batch * self.batch  # a smaller last batch stays the last
        batches = ordered[:whole].reshape(-1, self.batch)
        shuffled = batches[permutation(self.seed + 1, epoch, len(batches))]
        return np.concatenate([shuffled.ravel(), ordered[whole:]])


def by_length(order: Order, lengths: Sequence[int], batch: int) -> Order:
    """The same samples in batches of similar length."""
    array = np.asarray(lengths, dtype=np.int64)
    return LengthGrouped(order.size, order.seed, order.shuffle, lengths=array, batch=batch)


def spread(lengths: Sequence[int], ranks: int) -> list[int]:
    """Sample ids so ordered that equal contiguous shares hold equal work, longest first."""
    ids = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    return [int(one) for rank in range(ranks) for one in ids[rank::ranks]]
