"""The order of samples: a pure function of (seed, epoch, position).

No rank and no world size occurs in these functions' results, so a run that stops on four
processes is resumed on two. A *position* counts the samples of an epoch in their shuffled order,
from 0. Raw bit streams are used instead of numpy's ``Generator.permutation``, whose algorithm
may change between numpy versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.spec.errors import SettingError

Ids = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

POOL = 50
"""Batches whose samples are sorted by length together."""

EpochOrder = Callable[[int], Sequence[int] | Ids]
"""From an epoch's number to its sample ids, in the order in which they are visited."""


def permutation(seed: int, epoch: int, size: int) -> Ids:
    """All of ``range(size)``, shuffled; the same everywhere for the same three numbers."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(size)
    return np.argsort(raw, kind="stable").astype(np.int64)


@dataclass
class Order:
    """The order in which one data set is visited.

    Attributes:
        shuffle: False visits the samples as they are stored, in every epoch.
    """

    size: int
    seed: int
    shuffle: bool = True
    _cached: tuple[int, Ids] | None = field(default=None, init=False, repr=False)

    def epoch(self, epoch: int) -> Ids:
        """Sample ids of a whole epoch, shape ``[size]``."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._make(epoch))
        return self._cached[1]

    def at(self, epoch: int, positions: Ids) -> Ids:
        """The sample ids at these positions of an epoch, shape ``[n]``."""
        return self.epoch(epoch)[positions]

    def keep_epoch(self, epoch: int, batch: int) -> None:
        """Keeps the order of an epoch that began with another global batch."""

    def _make(self, epoch: int) -> Ids:
        if not self.shuffle:
            return np.arange(self.size, dtype=np.int64)
        return permutation(self.seed, epoch, self.size)


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
    _kept: tuple[int, int] = field(default=(-1, 0), init=False, repr=False)  # epoch, its batch

    def keep_epoch(self, epoch: int, batch: int) -> None:
        self._kept, self._cached = (epoch, batch), None

    def _make(self, epoch: int) -> Ids:
        ids = super()._make(epoch)
        if not self.shuffle:
            return ids
        kept_epoch, kept_batch = self._kept
        batch = kept_batch if epoch == kept_epoch else self.batch
        step = batch * POOL
        pools = [ids[start : start + step] for start in range(0, len(ids), step)]
        ordered = np.concatenate([p[np.argsort(self.lengths[p], kind="stable")] for p in pools])
        num_full = len(ids) // batch * batch  # a smaller last batch stays the last
        batches = ordered[:num_full].reshape(-1, batch)
        shuffled = batches[permutation(self.seed + 1, epoch, len(batches))]
        return np.concatenate([shuffled.ravel(), ordered[num_full:]])


@dataclass
class ShardOrder(Order):
    """Shards in a new order, some at a time, each from its beginning to its end.

    Shards that are visited together flow into one stream, in proportion to their sizes, and the
    stream is shuffled inside windows: a sample is at most a window from its place, so that disks
    read in order. Only the shards that are visited now are in memory.

    Attributes:
        shard_sizes: Samples of each shard, shape ``[shards]``; a shard's ids follow each other.
        num_concurrent: Shards that are visited at a time.
        window: Samples that are shuffled together.
    """

    shard_sizes: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_concurrent: int = 1
    window: int = 1
    _groups: dict[tuple[int, int], Ids] = field(default_factory=dict, init=False, repr=False)

    def at(self, epoch: int, positions: Ids) -> Ids:
        if not self.shuffle:
            return positions
        groups, starts = self._grouped(epoch)
        group_of = np.searchsorted(starts, positions, side="right") - 1
        ids = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(group_of).tolist():
            in_group = group_of == number
            stream = self._stream(epoch, number, groups[number], int(starts[number]))
            ids[in_group] = stream[positions[in_group] - starts[number]]
        return ids

    def _make(self, epoch: int) -> Ids:
        return self.at(epoch, np.arange(self.size, dtype=np.int64))

    def _grouped(self, epoch: int) -> tuple[list[Ids], Ids]:
        """Returns the groups of shards, and the position at which each group begins."""
        shards = np.flatnonzero(self.shard_sizes)
        shards = shards[permutation(self.seed + 1, epoch, len(shards))]
        groups = np.array_split(shards, max(1, -(-len(shards) // self.num_concurrent)))
        sizes = [int(self.shard_sizes[group].sum()) for group in groups]
        return groups, np.cumsum([0, *sizes[:-1]])

    def _stream(self, epoch: int, number: int, group: Ids, start: int) -> Ids:
        """Returns the ids of a group of shards in their order; keeps the last two groups."""
        if (epoch, number) not in self._groups:
            first = np.cumsum(self.shard_sizes) - self.shard_sizes
            ids = np.concatenate([first[s] + np.arange(self.shard_sizes[s]) for s in group])
            part = np.concatenate([(np.arange(n) + 0.5) / n for n in self.shard_sizes[group]])
            ids = ids[np.argsort(part, kind="stable")]
            places = np.arange(len(ids))
            drawn = uniforms(self.seed + 1, epoch, start + places, 1)[:, 0]
            while len(self._groups) > 1:
                del self._groups[next(iter(self._groups))]
            self._groups[epoch, number] = ids[np.lexsort((drawn, places // self.window))]
        return self._groups[epoch, number]


def group_by_length(order: Order, lengths: Sequence[int], batch: int) -> Order:
    """Returns an order in batches of similar length; SettingError if some lengths are missing."""
    array = np.asarray(lengths, dtype=np.int64)
    if array.shape != (order.size,):
        raise SettingError(
            "lengths must hold one number for each sample",
            found=f"{len(array)} lengths, {order.size} samples",
        )
    return LengthGrouped(order.size, order.seed, order.shuffle, lengths=array, batch=batch)


@dataclass
class ScriptOrder(Order):
    """An order that the script gives.

    Attributes:
        ids_of_epoch: Gives as many ids as there are samples; samples may be left out and repeated.
    """

    ids_of_epoch: EpochOrder = range

    def _make(self, epoch: int) -> Ids:
        ids = np.asarray(self.ids_of_epoch(epoch), dtype=np.int64)
        if ids.shape != (self.size,) or ids.min() < 0 or ids.max() >= self.size:
            raise SettingError(
                f"the order of epoch {epoch} must be {self.size} numbers from 0 to {self.size - 1}",
                found=f"an array of shape {list(ids.shape)}"
                + (f" from {ids.min()} to {ids.max()}" if ids.size else ""),
            )
        return ids


def with_script_order(order: Order, ids_of_epoch: EpochOrder) -> Order:
    """Returns an order that ``ids_of_epoch`` gives."""
    return ScriptOrder(order.size, order.seed, order.shuffle, ids_of_epoch=ids_of_epoch)


def rank_range(start: int, stop: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the contiguous part of positions ``[start, stop)`` that belongs to ``rank``.

    Shares are disjoint, cover everything and differ by at most one position; a share is empty
    when there are fewer positions than ranks.
    """
    count = stop - start
    return start + count * rank // size, start + count * (rank + 1) // size


def uniforms(seed: int, epoch: int, positions: Ids, count: int) -> NDArray[np.float64]:
    """Random numbers that belong to samples, not to ranks.

    Uniform in [0, 1), shape ``[n, count]`` for ``n`` positions in the epoch; row i depends on
    (seed, epoch, positions[i]) only.
    """
    stream = _mix(_mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)) ^ np.uint64(epoch))
    sample = _mix(stream ^ positions.astype(np.uint64))
    columns = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(sample[:, None] + columns[None, :])
    scaled: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return scaled


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
