"""Orders of samples besides shuffled and stored: by length, and as a script states it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.spec.errors import SettingError
from paceline.train.order import Ids, Order, permutation

POOL = 50
"""Batches whose samples are sorted by length together."""

Stated = Callable[[int], Sequence[int] | Ids]
"""From an epoch's number to its sample ids, in the order in which they are visited."""


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
    """The same samples in batches of similar length.

    Raises:
        SettingError: There are more or fewer lengths than samples.
    """
    array = np.asarray(lengths, dtype=np.int64)
    if array.shape != (order.size,):
        raise SettingError(
            "lengths must hold one number for each sample",
            found=f"{len(array)} lengths, {order.size} samples",
        )
    return LengthGrouped(order.size, order.seed, order.shuffle, lengths=array, batch=batch)


@dataclass
class StatedOrder(Order):
    """An order that the script states.

    Attributes:
        state: Gives as many ids as there are samples; samples may be left out and repeated.
    """

    state: Stated = range

    def _make(self, epoch: int) -> Ids:
        ids = np.asarray(self.state(epoch), dtype=np.int64)
        if ids.shape != (self.size,) or ids.min() < 0 or ids.max() >= self.size:
            raise SettingError(
                f"the order of epoch {epoch} must be {self.size} numbers from 0 to {self.size - 1}",
                found=f"an array of shape {list(ids.shape)}"
                + (f" from {ids.min()} to {ids.max()}" if ids.size else ""),
            )
        return ids


def stated(order: Order, state: Stated) -> Order:
    """The order that ``state`` gives instead."""
    return StatedOrder(order.size, order.seed, order.shuffle, state=state)
