"""The order of samples: a pure function of (seed, epoch, position).

No rank and no world size occurs in these functions' results, so a run that stops on four
processes goes on with two. A *position* counts the samples of an epoch in their shuffled order,
from 0. Raw bit streams are used instead of numpy's ``Generator.permutation``, whose algorithm
may change between numpy versions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permutation(seed: int, epoch: int, size: int) -> Ids:
    """All of ``range(size)``, shuffled; the same everywhere for the same three numbers."""
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=np.uint64)
    raw = np.random.Philox(key=key).random_raw(size)
    return np.argsort(raw, kind="stable").astype(np.int64)


@dataclass
class Order:
    """The order in which one data set is visited.

    Attributes:
        size: Number of samples.
        seed: Seed of the run.
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

    def _make(self, epoch: int) -> Ids:
        if not self.shuffle:
            return np.arange(self.size, dtype=np.int64)
        return permutation(self.seed, epoch, self.size)


def part(start: int, stop: int, rank: int, size: int) -> tuple[int, int]:
    """The contiguous share of positions ``[start, stop)`` that belongs to ``rank``.

    Shares are disjoint, cover everything and differ by at most one position; a share is empty
    when there are fewer positions than ranks.
    """
    count = stop - start
    return start + count * rank // size, start + count * (rank + 1) // size


def uniforms(seed: int, epoch: int, positions: Ids, count: int) -> NDArray[np.float64]:
    """Random numbers that belong to samples, not to ranks.

    Args:
        seed: Seed of the run.
        epoch: Epoch number.
        positions: Positions in the epoch, shape ``[n]``.
        count: Numbers for each sample.

    Returns:
        Uniform in [0, 1), shape ``[n, count]``; row i depends on (seed, epoch, positions[i]) only.
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
