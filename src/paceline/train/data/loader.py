"""Batches of a data set: each rank gets its share of every global batch."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from paceline.spec.errors import DataError, SettingError
from paceline.spec.formatting import pluralize
from paceline.train.data.balance import Shares, consolidate, share_bounds
from paceline.train.data.fetch import BatchRequest, Draws, Fetch
from paceline.train.data.order import Ids, Order, rank_range


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a global batch; unpacks like the tuple that the data set makes.

    Where it makes dictionaries, ``batch["name"]`` and ``model(**batch)`` work.

    Attributes:
        data: What the data set made, on the session's device.
        count: How many of the leading samples count. It is 0 where a rank's share is empty and
            the batch holds stand-ins, so that every rank takes part in every step.
        total: Samples of the whole global batch, over all ranks.
        ids: Sample ids, shape ``[max(count, 1)]``, or of two samples where batch normalisation
            has nothing to compute of one.
        stop: Position in the epoch after the global batch.
        last: True for the last part of the global batch on this rank: the optimizer steps.
        draws: Random numbers of these samples, the same on however many ranks (a generator's
            input); ``None`` in an evaluation.
    """

    data: tuple[Any, ...]
    count: int
    total: int
    ids: Ids
    stop: int
    last: bool = True
    draws: Draws | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: str) -> Any:
        return self.data[0][key]

    def keys(self) -> Iterable[str]:
        """Names in a dictionary."""
        names: Iterable[str] = self.data[0].keys()
        return names

    def items(self) -> Iterable[tuple[str, Any]]:
        """Names and values in a dictionary."""
        items: Iterable[tuple[str, Any]] = self.data[0].items()
        return items

    def counted(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors without stand-ins, for metrics that take whole batches."""
        return tuple(tensor[: self.count] for tensor in tensors)


def rank_pieces(
    start: int,
    stop: int,
    rank: int,
    size: int,
    limit: int = 0,
    weights: Shares | None = None,
    *,
    equal_pieces: bool = True,
    min_samples: int = 1,
) -> Sequence[tuple[int, int]]:
    """Returns the positions that one rank computes of a global batch, in pieces.

    Args:
        start, stop: The global batch.
        rank, size: This rank, and how many there are.
        limit: Most samples of a piece; 0: no limit.
        weights: Shares of the ranks in a whole global batch; ``None``: all alike.
        equal_pieces: Every rank gets the same number of pieces.
        min_samples: Samples that a rank needs, if it has any.
    """
    total = stop - start
    if min_samples > 1:
        weights = consolidate(total, size, weights, min_samples)
    if weights is None:
        first, end = rank_range(start, stop, rank, size)
        largest = -(-total // size)
    else:
        first, end = (start + bound for bound in share_bounds(total, weights, rank))
        largest = end - first
        if equal_pieces and limit:
            shares = (share_bounds(total, weights, index) for index in range(len(weights)))
            largest = max(share_end - share_start for share_start, share_end in shares)
    pieces = max(1, -(-largest // limit)) if limit else 1
    return [rank_range(first, end, piece, pieces) for piece in range(pieces)]


def check_batch_size(global_batch: int, samples: int, ranks: int) -> None:
    """Refuses fewer samples than ranks, and an empty global batch."""
    if samples < ranks:
        raise DataError(
            "there are more ranks than training samples",
            found=f"{pluralize(samples, 'sample')}, {ranks} ranks",
            remedy=f"use at most {samples} process{'es' * (samples != 1)}, or more data",
        )
    if global_batch < 1:
        raise SettingError(f"--global-batch {global_batch} must be at least 1")


@dataclass
class Progress:
    """Position of the training in the data.

    Attributes:
        step: Global steps done.
        epoch: The running epoch, from 0.
        offset: Samples of the running epoch that are done.
        steps: Global steps of the whole training; 0 while unknown.
        global_batch: Samples of a global batch in the training so far; 0 if unknown.
        order_batch: Global batch with which the running epoch began: its order depends on it.
        samples: Training samples of an epoch so far; 0 if unknown.
        evaluated: The newest step whose pause, for an evaluation, the script has finished.
        stand_in: The batch that the script has now is a stand-in, which no metric counts.
        some_absent: There are or were ranks without any share of a batch, which measure nothing.
        updated: Updates of models within the step that is under way.
    """

    step: int = 0
    epoch: int = 0
    offset: int = 0
    steps: int = 0
    evaluated: int = 0
    stand_in: bool = False
    some_absent: bool = False
    updated: int = 0
    global_batch: int = 0
    order_batch: int = 0
    samples: int = 0

    @property
    def finished(self) -> bool:
        return 0 < self.steps <= self.step

    @property
    def awaits_evaluation(self) -> bool:
        """Whether steps were done since the script last finished a pause."""
        return self.evaluated < self.step


def check_limit(limit: object) -> None:
    """Raises SettingError unless the limit is a number of samples, or such numbers by host."""
    limits = [*limit.values()] if isinstance(limit, Mapping) else [limit]
    negative = isinstance(limit, Integral) and limit < 0
    if negative or not all(isinstance(value, Integral) for value in limits):
        raise SettingError(
            f"limit={limit!r} is not valid",
            remedy='give samples that a rank computes at once, or 0, or some by host: {"n2": 8}',
        )


class Loader:
    """Iterates over this rank's parts of the global batches of the running epoch.

    Made by ``session.loader``. Every batch must be given to ``session.step``, which asks for it
    here (:meth:`take`).

    Args:
        fetch: Turns ids into tensors.
        place: Gives this rank and the number of ranks, which may change between two batches.
        global_batch: Samples of one step over all ranks; the last of an epoch may be smaller.
        limit: Most samples that one rank computes at once (0: no limit).
        progress: Position in the data, advanced by the session: its own, or a rehearsal's.
        unsynced: The context in which a piece that is not the last of its global batch is
            computed: only the last one exchanges gradients.

    Attributes:
        limit: As above; may be another on each rank.
        has_common_limit: It is the same on every rank.
        memory_fits: Host and limit of each rank, where they were found by trying.
        pause_interval: Global steps between two pauses for an evaluation (0: only at the end of an
            epoch).
        waited_s: Seconds in which the script waited for data.
        num_repeated: Batches of which the script got a piece in vain: they are given again.
        balance, drop_slow: As the training asked for them; see ``session.loader``.
        shares: Gives the shares of a global batch. Others from one step to the next are heeded at
            once, and what has been fetched under the former ones is dropped.
        equal_pieces: Says whether each rank must have as many pieces of a batch as the others.
        min_samples: Samples that the model needs at once, 1 or 2: batch normalisation can compute
            nothing of one.
        headroom: Returns how many times the largest batch so far fits into this rank's memory; a
            larger share is computed in pieces.
        compute_idle: Called for a step in which this rank has no samples; if ``None``, such a rank
            computes a stand-in.
        on_arrival: Called when a batch of the training is there, before the script gets it.
        generation: Number of the group of ranks among which batches are divided.
        on_boundary: Called before each global batch: between two steps other ranks may join.
        on_iteration: Called with this loader when the script begins to iterate over it.
        on_global_batch: Called when a global batch is given to the script, newly or again.
    """

    def __init__(
        self,
        fetch: Fetch,
        order: Order,
        place: Callable[[], tuple[int, int]],
        global_batch: int,
        limit: int,
        progress: Progress,
        unsynced: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        check_batch_size(global_batch, order.size, place()[1])
        self.kind = fetch.kind  # class of the data set
        self._fetch, self.order, self._rank_and_size = fetch, order, place
        self.global_batch, self.limit, self.has_common_limit = global_batch, limit, True
        self.memory_fits: Sequence[tuple[str, int]] = ()
        self.progress, self._unsynced = progress, unsynced
        self._current: Batch | None = None
        self.balance: Any = "even"
        self.drop_slow = False
        self.shares: Callable[[], Shares | None] = lambda: None
        self.equal_pieces: Callable[[], bool] = lambda: True
        self.compute_idle: Callable[[Batch], None] | None = None
        self.headroom: Callable[[], float] = lambda: math.inf
        self.min_samples = 1
        self._max_computed = 0  # samples that were computed at once
        self.pause_interval, self.waited_s = 0, 0.0
        self.on_arrival: Callable[[], object] = lambda: None
        self.generation: Callable[[], int] = lambda: 0
        self.on_boundary: Callable[[], object] = lambda: None
        self.on_iteration: Callable[[Loader], object] = lambda loader: None
        self.on_global_batch: Callable[[], object] = lambda: None
        self._void, self.num_repeated = False, 0
        # generation in which the batch that the script has was divided, and this rank's place
        self._division: tuple[int, tuple[int, int]] = 0, (0, 0)

    def __len__(self) -> int:
        """Global steps of a whole epoch."""
        return -(-self.order.size // self.global_batch)

    def steps_left(self, epochs: int) -> int:
        """Returns the global steps until the end of so many epochs; negative if it is passed.

        They are counted from the position in the data: after a resume, earlier steps may have had
        another global batch.
        """
        samples = max(0, self.order.size - self.progress.offset)
        whole_epochs = epochs - self.progress.epoch - 1
        return -(-samples // self.global_batch) + whole_epochs * len(self)

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches from the current position to the end of epoch or training, or a pause."""
        progress, step = self.progress, self.progress.step
        # A checkpoint may be of a pause's beginning: what the script does in it comes first then.
        pause = progress.awaits_evaluation and self.pauses_now()
        if not progress.steps:
            raise RuntimeError(
                "the training loader is to be used within: for epoch in session.epochs(loader, N)"
            )
        self.on_iteration(self)

        def has_more() -> bool:
            return progress.offset < self.order.size and not progress.finished and not pause

        def is_current() -> bool:
            self.on_boundary()
            return self.shares() is by and not self.is_outdated

        try:
            while has_more():
                self.on_boundary()
                by, self._void = self.shares(), False
                self._division = self.generation(), self._rank_and_size()
                if (
                    self.compute_idle is not None
                    and by is not None
                    and not by[self._rank_and_size()[0]]
                ):
                    while has_more() and is_current():
                        self.on_global_batch()
                        self.compute_idle(self._empty_batch())
                        step, pause = progress.step, progress.step > step and self.pauses_now()
                    continue
                requests = self._requests(progress.epoch, progress.offset, by)
                with closing(self._fetch(requests)) as batches:
                    while has_more() and is_current():
                        yield from self._step(batches)
                        step, pause = progress.step, progress.step > step and self.pauses_now()
        finally:
            self._current, progress.stand_in = None, False
            if progress.finished:
                self._fetch.close()

    def _step(self, batches: Iterator[tuple[Batch, tuple[Any, ...]]]) -> Iterator[Batch]:
        """Yields all pieces of one global batch while its division is current."""
        start, is_last = self.progress.offset, False
        self.on_global_batch()
        while not is_last:
            wait_start = time.perf_counter()
            template, data = next(batches)
            self.waited_s += time.perf_counter() - wait_start
            self.on_arrival()
            batch, is_last = replace(template, data=data), template.last
            self._current, self.progress.stand_in = batch, not batch.count
            self._max_computed = max(self._max_computed, batch.count)
            with nullcontext() if is_last else self._unsynced():
                yield batch
            if self.is_outdated:
                self.num_repeated += 1
                return
        if self.progress.offset == start:
            raise RuntimeError(
                "a batch was not given to session.step: every batch of a session.loader must be (to"
                " leave one out of the training, multiply its losses by 0); to evaluate, iterate"
                " over session.shard(data) instead"
            )

    @property
    def is_at_end(self) -> bool:
        """Whether the batch loop ends here: at the end of epoch or training, or at a pause."""
        progress = self.progress
        pauses = progress.awaits_evaluation and self.pauses_now()
        return progress.finished or progress.offset >= self.order.size or pauses

    @property
    def is_outdated(self) -> bool:
        """Whether the current batch was divided among other ranks than there are now.

        Unless it counts all the same, it is given again, newly divided.
        """
        return self._void or (self.generation(), self._rank_and_size()) != self._division

    def void(self) -> None:
        """Discards the current global batch: it is given again."""
        self._void = self.progress.stand_in = True

    def rehearsal(self, steps: int, *, order: Order | None = None, global_batch: int = 0) -> Loader:
        """Returns a loader of the same data for so many steps, with its own position.

        Args:
            order: Instead of the training's.
            global_batch: Instead of the training's, and not in pieces.
        """
        loader = Loader(
            self._fetch,
            order or self.order,
            self._rank_and_size,
            global_batch or self.global_batch,
            0 if global_batch else self.limit,
            Progress(steps=steps),
            self._unsynced,
        )
        loader.min_samples = self.min_samples
        return loader

    def current(self) -> Batch:
        """Returns the batch that the script has now."""
        if self._current is None:
            raise RuntimeError("session.step was called without a new batch from the loader")
        return self._current

    def take(self) -> Batch:
        """Returns the batch that the script has now, once, for the step."""
        batch = self.current()
        self._current = None
        return batch

    def pauses_now(self) -> bool:
        """Whether the script gets control after this step, for an evaluation."""
        return self.pause_interval > 0 and self.progress.step % self.pause_interval == 0

    def _global_batches(self, offset: int) -> Iterator[tuple[int, int]]:
        """Yields start and end of the remaining global batches of an epoch."""
        for start in range(offset, self.order.size, self.global_batch):
            yield start, min(start + self.global_batch, self.order.size)

    def _empty_batch(self) -> Batch:
        """Returns this rank's part of the next global batch if it has no share."""
        start, stop = next(self._global_batches(self.progress.offset))
        return Batch((), 0, stop - start, np.zeros(0, dtype=np.int64), stop)

    def _requests(
        self, epoch: int, offset: int, weights: Shares | None
    ) -> Iterator[BatchRequest[Batch]]:
        equal_pieces, limit = self.equal_pieces(), self.limit
        rank, ranks = self._rank_and_size()
        if weights is not None and not equal_pieces and self._max_computed < weights[rank]:
            # Before a first batch nothing is known of what one takes: an even share was asked for.
            headroom = self.headroom()
            if self._max_computed or math.isinf(headroom):
                max_samples = max(1, self._max_computed) * max(1.0, headroom)
            else:
                max_samples = -(-self.global_batch // ranks)
            max_samples = int(min(weights[rank], max_samples))
            limit = min(limit or max_samples, max_samples)
        # Who asks for single samples gets them. A batch is cut alike on every rank.
        is_single = self.has_common_limit and self.limit == 1
        for start, stop in self._global_batches(offset):
            is_small = stop - start < self.global_batch
            pieces = rank_pieces(
                start,
                stop,
                rank,
                ranks,
                limit,
                weights,
                equal_pieces=equal_pieces,
                min_samples=self.min_samples if is_small and not is_single else 1,
            )
            min_samples = self.min_samples if limit != 1 and (is_small or len(pieces) > 1) else 1
            for piece_number, (first, end) in enumerate(pieces, 1):
                positions = np.arange(first, end)
                if end == first:  # computes the batch's first samples with weight zero
                    positions = np.arange(start, stop)[:min_samples]
                if len(positions) < min_samples:  # twice: the mean loss is that of the one
                    positions = np.repeat(positions, min_samples)
                ids = self.order.at(epoch, positions)
                draws = Draws(self.order.seed, epoch, positions)
                is_last = piece_number == len(pieces)
                tag = Batch((), end - first, stop - start, ids, stop, is_last, draws)
                yield BatchRequest(ids, draws, tag)


class Shard:
    """Iterates over this rank's share of all samples in stored order, for evaluation.

    Made by ``session.shard``; may be iterated over as often as is liked, from its beginning every
    time. It gives batches without augmentation, the same number on every rank (so that the model
    may communicate); where a share is used up, one of count 0. When ranks were lost meanwhile, the
    others go on with all samples of theirs, newly divided: also with those that they had seen, for
    what they measured is gone.

    Args:
        fetch, place, progress: As of :class:`Loader`.
        size: Most samples in a batch.
        on_batch: Called before each batch is given out.
        shares: Gives the shares of the training, by which these are divided, too.
        on_iteration: Called at the beginning of each iteration, not only of the first: a rank that
            came for a lost one begins its first when the others begin a later one.
        slot: Number of this rank that never changes; the rank where there is none.
        list_slots: Returns the slots of all ranks that are present, in rank order: a collective.
            ``None`` if ranks cannot be lost.
    """

    def __init__(
        self,
        fetch: Fetch,
        samples: int,
        place: Callable[[], tuple[int, int]],
        size: int,
        progress: Progress,
        on_batch: Callable[[], None],
        shares: Callable[[], Shares | None] = lambda: None,
        *,
        on_iteration: Callable[[], object] = lambda: None,
        slot: int | None = None,
        list_slots: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._fetch, self._samples = fetch, samples
        self._progress, self._on_batch = progress, on_batch
        self._place, self._size, self._shares = place, size, shares
        self._on_iteration, self._slot, self._list_slots = on_iteration, slot, list_slots

    def __len__(self) -> int:
        """Batches of an iteration, the same on every rank (where none is lost)."""
        return self._samples and len(
            rank_pieces(0, self._samples, *self._place(), self._size, self._shares())
        )

    def __iter__(self) -> Iterator[Batch]:
        self._on_iteration()
        was_stand_in = self._progress.stand_in  # of the training, inside whose loop this may be
        slots, weights = self._present_slots(), self._shares()
        remaining: Spans = [(0, self._samples)] if self._samples else []
        spans_by_slot: dict[int, Spans] = defaultdict(list)  # what each has seen or is to see
        try:
            while remaining:
                weights = weights if weights is not None and len(weights) == len(slots) else None
                total = sum(end - start for start, end in remaining)
                for index, slot in enumerate(slots):
                    (bounds,) = rank_pieces(0, total, index, len(slots), 0, weights)
                    spans_by_slot[slot] += _slice_spans(remaining, *bounds)
                requests = self._requests(remaining, total, slots, weights)
                with closing(self._fetch(requests)) as batches:
                    for template, data in batches:
                        self._progress.stand_in = not template.count
                        self._on_batch()
                        yield replace(template, data=data)
                slots, weights = self._present_slots(), None
                remaining = [
                    span
                    for slot in [*spans_by_slot]
                    if slot not in slots
                    for span in spans_by_slot.pop(slot)
                ]
        finally:
            self._progress.stand_in = was_stand_in

    def _present_slots(self) -> Sequence[int]:
        return range(self._place()[1]) if self._list_slots is None else self._list_slots()

    def _requests(
        self, remaining: Spans, total: int, slots: Sequence[int], weights: Shares | None
    ) -> Iterator[BatchRequest[Batch]]:
        """Yields this rank's requests; of an empty batch before it has joined."""
        slot = self._place()[0] if self._slot is None or self._list_slots is None else self._slot
        index = slots.index(slot) if slot in slots else None
        for first, end in rank_pieces(0, total, index or 0, len(slots), self._size, weights):
            local_spans = [] if index is None else _slice_spans(remaining, first, end)
            ids = np.concatenate([np.arange(*span) for span in local_spans or [(0, 1)]])
            count = sum(stop - start for start, stop in local_spans)
            yield BatchRequest(ids, None, Batch((), count, self._samples, ids, end))


Spans = list[tuple[int, int]]


def _slice_spans(spans: Spans, first: int, end: int) -> Spans:
    """Returns positions ``first`` to ``end`` of concatenated spans, as spans."""
    pieces, offset = [], 0
    for start, stop in spans:
        low, high = max(first, offset), min(end, offset + stop - start)
        if low < high:
            pieces.append((start + low - offset, start + high - offset))
        offset += stop - start
    return pieces
