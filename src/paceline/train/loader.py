"""Batches of a data set: each rank gets its share of every global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from paceline.spec.errors import DataError, SettingError
from paceline.train.order import Ids, Order, part, uniforms


@dataclass(frozen=True, slots=True)
class Draws:
    """Random numbers for the samples of a batch, the same whichever rank gets them.

    Attributes:
        seed: Seed of the run.
        epoch: Epoch number.
        positions: Position of each sample in the epoch, shape ``[n]``.
    """

    seed: int
    epoch: int
    positions: Ids

    def uniform(self, count: int) -> NDArray[np.float64]:
        """``count`` numbers in [0, 1) for each sample, shape ``[n, count]``."""
        return uniforms(self.seed, self.epoch, self.positions, count)


@runtime_checkable
class Batched(Protocol):
    """A data set that makes whole batches (faster than one sample at a time)."""

    def __len__(self) -> int: ...

    def batch(self, ids: Ids, draws: Draws | None) -> tuple[Tensor, ...]:
        """The samples ``ids`` as tensors whose first dimension is the sample.

        ``draws`` holds the randomness for augmentation; ``None`` asks for the plain samples.
        """
        ...


class Mapped(Protocol):
    """Any of torch's map-style data sets."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Data = Batched | Mapped


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a global batch; unpacks like the tuple that the data set makes.

    Attributes:
        data: What the data set made, on the session's device.
        count: How many of the leading samples count. It is 0 where a rank's share is empty and
            the batch holds a single stand-in, so that every rank takes part in every step.
        total: Samples of the whole global batch, over all ranks.
        ids: Sample ids, shape ``[max(count, 1)]``.
        stop: Position in the epoch after the global batch.
        last: True for the last part of the global batch on this rank: the optimizer steps.
    """

    data: tuple[Any, ...]
    count: int
    total: int
    ids: Ids
    stop: int
    last: bool = True

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def shares(
    start: int, stop: int, rank: int, size: int, limit: int = 0
) -> Sequence[tuple[int, int]]:
    """The positions that one rank computes of the global batch ``[start, stop)``, in pieces.

    Every rank gets the same number of pieces, each of at most ``limit`` samples (0: no limit).
    """
    first, end = part(start, stop, rank, size)
    largest = -(-(stop - start) // size)
    pieces = max(1, -(-largest // limit)) if limit else 1
    return [part(first, end, piece, pieces) for piece in range(pieces)]


def check_batch(global_batch: int, samples: int, ranks: int) -> None:
    """Refuses a batch or a data set that cannot be shared among the ranks."""
    if samples < ranks:
        raise DataError(
            "there are more ranks than training samples",
            found=f"{samples} samples, {ranks} ranks",
            remedy=f"use at most {samples} processes, or more data",
        )
    if global_batch < 1:
        raise SettingError(f"--global-batch {global_batch} must be at least 1")


class Fetch:
    """Turns sample ids into tensors on a device.

    Args:
        data: A data set that makes batches, a ``TensorDataset``, or any map-style data set.
        device: Where the tensors go.
    """

    def __init__(self, data: Data, device: torch.device) -> None:
        self._make = _maker(data)
        self._device = device

    def __call__(self, ids: Ids, draws: Draws | None) -> tuple[Any, ...]:
        made = self._make(ids, draws)
        if self._device.type == "cpu":
            return made
        return tuple(_moved(one, self._device) for one in made)


def _maker(data: Data) -> Callable[[Ids, Draws | None], tuple[Any, ...]]:
    if isinstance(data, Batched):
        return data.batch
    if isinstance(data, TensorDataset):
        tensors = data.tensors
        return lambda ids, _: tuple(one[torch.from_numpy(ids)] for one in tensors)
    return lambda ids, _: _collated([data[int(index)] for index in ids])


def _collated(samples: list[Any]) -> tuple[Any, ...]:
    made = default_collate(samples)
    return tuple(made) if isinstance(made, (list, tuple)) else (made,)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


@dataclass
class Progress:
    """How far the training is: the whole position in the data.

    Attributes:
        step: Global steps done.
        epoch: The running epoch, from 0.
        offset: Samples of the running epoch that are done.
        steps: Global steps of the whole training; 0 while unknown.
    """

    step: int = 0
    epoch: int = 0
    offset: int = 0
    steps: int = 0

    @property
    def finished(self) -> bool:
        return 0 < self.steps <= self.step


class Loader:
    """The rest of the running epoch as this rank's parts of its global batches.

    Made by ``session.loader``. Every batch must be given to ``session.step``.

    Args:
        fetch: Turns ids into tensors.
        order: Order of the samples.
        place: This rank and the number of ranks.
        global_batch: Samples of one step over all ranks; the last of an epoch may be smaller.
        limit: Most samples that one rank computes at once (0: no limit).
        progress: Shared with the session, which advances it.
        hand_over: Called with each batch before it is given out.
    """

    def __init__(
        self,
        fetch: Fetch,
        order: Order,
        place: tuple[int, int],
        global_batch: int,
        limit: int,
        progress: Progress,
        hand_over: Callable[[Batch], None],
    ) -> None:
        check_batch(global_batch, order.size, place[1])
        self._fetch, self.order, self._place = fetch, order, place
        self.global_batch, self._limit = global_batch, limit
        self._progress, self._hand_over = progress, hand_over

    def __len__(self) -> int:
        """Global steps of a whole epoch."""
        return -(-self.order.size // self.global_batch)

    def __iter__(self) -> Iterator[Batch]:
        progress = self._progress
        while progress.offset < self.order.size and not progress.finished:
            start = progress.offset
            for batch in self._step(progress.epoch, start):
                self._hand_over(batch)
                yield batch
            if progress.offset == start:
                raise RuntimeError("a batch was not given to session.step")

    def _step(self, epoch: int, start: int) -> Iterator[Batch]:
        stop = min(start + self.global_batch, self.order.size)
        pieces = shares(start, stop, *self._place, self._limit)
        for number, (first, end) in enumerate(pieces, 1):
            # An empty share computes the batch's first sample with weight zero.
            positions = np.arange(first, end) if end > first else np.array([start])
            ids = self.order.epoch(epoch)[positions]
            data = self._fetch(ids, Draws(self.order.seed, epoch, positions))
            yield Batch(data, end - first, stop - start, ids, stop, number == len(pieces))


def shard(fetch: Fetch, samples: int, place: tuple[int, int], size: int) -> Iterator[Batch]:
    """This rank's share of all samples in their stored order, for evaluation.

    Args:
        fetch: Turns ids into tensors.
        samples: Number of samples.
        place: This rank and the number of ranks.
        size: Most samples in a batch.

    Yields:
        Batches without augmentation, the same number on every rank (so that the model may
        communicate); where a share is used up, one of count 0.
    """
    for first, end in shares(0, samples, *place, size):
        ids = np.arange(first, end) if end > first else np.array([0])
        yield Batch(fetch(ids, None), end - first, samples, ids, end)
