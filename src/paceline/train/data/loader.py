"""Batches of a data set: each rank gets its share of every global batch."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from paceline.spec.errors import DataError, SettingError
from paceline.train.data.balance import Shares, bounds, gathered
from paceline.train.data.fetch import Draws, Fetch, Wanted
from paceline.train.data.order import Ids, Order, part
from paceline.train.measure.pace import counted


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
        """The tensors without stand-ins: for metrics that take whole batches."""
        return tuple(tensor[: self.count] for tensor in tensors)


def shares(
    start: int,
    stop: int,
    rank: int,
    size: int,
    limit: int = 0,
    by: Shares | None = None,
    *,
    alike: bool = True,
    least: int = 1,
) -> Sequence[tuple[int, int]]:
    """The positions that one rank computes of the global batch ``[start, stop)``, in pieces.

    Args:
        start, stop: The global batch.
        rank, size: This rank, and how many there are.
        limit: Most samples of a piece; 0: no limit.
        by: Shares of the ranks in a whole global batch; ``None``: all alike.
        alike: Every rank gets the same number of pieces.
        least: Samples that a rank needs, if it has any.
    """
    total = stop - start
    if least > 1:
        by = gathered(total, size, by, least)
    if by is None:
        first, end = part(start, stop, rank, size)
        largest = -(-total // size)
    else:
        first, end = (start + cut for cut in bounds(total, by, rank))
        largest = end - first
        if alike and limit:
            whole = sum(by)
            ends = [total * so_far // whole for so_far in itertools.accumulate(by, initial=0)]
            largest = max(end - begin for begin, end in itertools.pairwise(ends))
    pieces = max(1, -(-largest // limit)) if limit else 1
    return [part(first, end, piece, pieces) for piece in range(pieces)]


def check_batch(global_batch: int, samples: int, ranks: int) -> None:
    """Refuses a batch or a data set that cannot be shared among the ranks."""
    if samples < ranks:
        raise DataError(
            "there are more ranks than training samples",
            found=f"{counted(samples, 'sample')}, {ranks} ranks",
            remedy=f"use at most {samples} process{'es' * (samples != 1)}, or more data",
        )
    if global_batch < 1:
        raise SettingError(f"--global-batch {global_batch} must be at least 1")


@dataclass
class Progress:
    """How far the training is: the whole position in the data.

    Attributes:
        step: Global steps done.
        epoch: The running epoch, from 0.
        offset: Samples of the running epoch that are done.
        steps: Global steps of the whole training; 0 while unknown.
        evaluated: The step after which the script has had control last, for an evaluation.
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

    @property
    def finished(self) -> bool:
        return 0 < self.steps <= self.step


def check_limit(limit: object) -> None:
    """Refuses what is no number of samples, nor such numbers by host.

    Raises:
        SettingError: It is neither.
    """
    every = [*limit.values()] if isinstance(limit, Mapping) else [limit]
    negative = isinstance(limit, Integral) and limit < 0
    if negative or not all(isinstance(one, Integral) for one in every):
        raise SettingError(
            f"limit={limit!r} cannot be understood",
            remedy='give samples that a rank computes at once, or 0, or some by host: {"n2": 8}',
        )


class Loader:
    """The rest of the running epoch as this rank's parts of its global batches.

    Made by ``session.loader``. Every batch must be given to ``session.step``, which asks for it
    here (:meth:`take`).

    Args:
        fetch: Turns ids into tensors.
        order: Order of the samples.
        place: Gives this rank and the number of ranks, which may change between two batches.
        global_batch: Samples of one step over all ranks; the last of an epoch may be smaller.
        limit: Most samples that one rank computes at once (0: no limit).
        progress: Shared with the session, which advances it.
        unsynced: The context in which a piece that is not the last of its global batch is
            computed: only the last one exchanges gradients.

    Attributes:
        limit: As above; may be another on each rank.
        same_limit: It is the same on every rank.
        fits: Host and limit of each rank, where they were found by trying.
        every: Global steps after which an iteration pauses, for an evaluation (0: at the end of
            the epoch only).
        waited: Seconds in which the script waited for data.
        balance, drop_slow: As the training asked for them; see ``session.loader``.
        shares: Gives the shares of a global batch. Others from one step to the next are heeded at
            once, and what has been fetched under the former ones is dropped.
        alike: Says whether each rank must have as many pieces of a batch as the others.
        least: Samples that the model needs at once, 1 or 2: batch normalisation can compute
            nothing of one.
        room: Gives how many times the most samples so far fit into this rank's memory at once: a
            share that has grown beyond comes in pieces.
        idle: Does this rank's part of a step in which it has nothing to compute; without it such
            a rank computes a stand-in.
        arrived: Called when a batch of the training is there, before the script gets it.
        generation: Number of the group of ranks among which batches are divided.
        boundary: Called before each global batch: between two steps other ranks may join.
        begun: Called with this loader when the script begins to iterate over it.
        begins: Called when a global batch is given to the script, newly or again.
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
        check_batch(global_batch, order.size, place()[1])
        self._fetch, self.order, self._place = fetch, order, place
        self.global_batch, self.limit, self.same_limit = global_batch, limit, True
        self.fits: Sequence[tuple[str, int]] = ()
        self._progress, self._unsynced = progress, unsynced
        self._given: Batch | None = None
        self.balance: Any = "even"
        self.drop_slow = False
        self.shares: Callable[[], Shares | None] = lambda: None
        self.alike: Callable[[], bool] = lambda: True
        self.idle: Callable[[Batch], None] | None = None
        self.room: Callable[[], float] = lambda: math.inf
        self.least = 1
        self._most = 0  # samples that were computed at once
        self.every, self.waited = 0, 0.0
        self.arrived: Callable[[], object] = lambda: None
        self.generation: Callable[[], int] = lambda: 0
        self.boundary: Callable[[], object] = lambda: None
        self.begun: Callable[[Loader], object] = lambda loader: None
        self.begins: Callable[[], object] = lambda: None
        self._void = False
        # generation in which the batch that the script has was divided, and this rank's place
        self._divided: tuple[int, tuple[int, int]] = 0, (0, 0)

    def __len__(self) -> int:
        """Global steps of a whole epoch."""
        return -(-self.order.size // self.global_batch)

    @property
    def kind(self) -> str:
        """Class of the data set."""
        return self._fetch.kind

    def __iter__(self) -> Iterator[Batch]:
        """The batches from where the epoch stands to its end, the training's, or a pause."""
        progress, step = self._progress, self._progress.step
        # A checkpoint may be of a pause's beginning: what the script does in it comes first then.
        pause = step > progress.evaluated and self.pauses()
        if not progress.steps:
            raise RuntimeError(
                "the training loader is to be used within: for epoch in session.epochs(loader, N)"
            )
        self.begun(self)

        def goes_on() -> bool:
            return progress.offset < self.order.size and not progress.finished and not pause

        def divided_so() -> bool:
            self.boundary()
            return self.shares() is by and not self.outdated

        try:
            while goes_on():
                self.boundary()
                by, self._void = self.shares(), False
                self._divided = self.generation(), self._place()
                if self.idle is not None and by is not None and not by[self._place()[0]]:
                    while goes_on() and divided_so():
                        self.begins()
                        self.idle(self._nothing())
                        step, pause = progress.step, progress.step > step and self.pauses()
                    continue
                wanted = self._wanted(progress.epoch, progress.offset, by)
                with closing(self._fetch(wanted)) as batches:
                    while goes_on() and divided_so():
                        yield from self._step(batches)
                        step, pause = progress.step, progress.step > step and self.pauses()
        finally:
            self._given, progress.stand_in = None, False
            if progress.finished:
                self._fetch.close()

    def _step(self, batches: Iterator[tuple[Batch, tuple[Any, ...]]]) -> Iterator[Batch]:
        """All pieces of one global batch, as long as the ranks among which it is divided."""
        start, last = self._progress.offset, False
        self.begins()
        while not last:
            before = time.perf_counter()
            empty, data = next(batches)
            self.waited += time.perf_counter() - before
            self.arrived()
            batch, last = replace(empty, data=data), empty.last
            self._given, self._progress.stand_in = batch, not batch.count
            self._most = max(self._most, batch.count)
            with nullcontext() if last else self._unsynced():
                yield batch
            if self.outdated:
                return
        if self._progress.offset == start:
            raise RuntimeError("a batch was not given to session.step")

    @property
    def outdated(self) -> bool:
        """The batch that the script has was divided among other ranks than there are now.

        Unless it counts all the same, it is given again, newly divided.
        """
        return self._void or (self.generation(), self._place()) != self._divided

    def void(self) -> None:
        """The global batch that the script has does not count: it is given again."""
        self._void = self._progress.stand_in = True

    @property
    def progress(self) -> Progress:
        """The position in the data; that of the session, but in a rehearsal."""
        return self._progress

    def rehearsal(self, steps: int, *, order: Order | None = None, global_batch: int = 0) -> Loader:
        """The same data for so many steps with a position of its own.

        Args:
            steps: Global steps.
            order: Of the samples, instead of the training's.
            global_batch: Instead of the training's, and not in pieces.
        """
        made = Loader(
            self._fetch,
            order or self.order,
            self._place,
            global_batch or self.global_batch,
            0 if global_batch else self.limit,
            Progress(steps=steps),
            self._unsynced,
        )
        made.least = self.least
        return made

    def given(self) -> Batch:
        """The batch that the script has now."""
        if self._given is None:
            raise RuntimeError("session.step was called without a new batch from the loader")
        return self._given

    def take(self) -> Batch:
        """The batch that the script has now, for the step; each of them once."""
        batch = self.given()
        self._given = None
        return batch

    def pauses(self) -> bool:
        """True when the script has control after this step, for an evaluation."""
        return self.every > 0 and self._progress.step % self.every == 0

    def _spans(self, offset: int) -> Iterator[tuple[int, int]]:
        """The global batches of the rest of an epoch, by their positions."""
        for start in range(offset, self.order.size, self.global_batch):
            yield start, min(start + self.global_batch, self.order.size)

    def _nothing(self) -> Batch:
        """This rank's part of the next global batch, in which it has no share."""
        start, stop = next(self._spans(self._progress.offset))
        return Batch((), 0, stop - start, np.zeros(0, dtype=np.int64), stop)

    def _wanted(self, epoch: int, offset: int, by: Shares | None) -> Iterator[Wanted[Batch]]:
        alike, limit = self.alike(), self.limit
        rank, ranks = self._place()
        if by is not None and not alike and self._most < by[rank]:
            # Before a first batch nothing is known of what one takes: an even share was asked for.
            room = self.room()
            known = self._most > 0 or math.isinf(room)
            fits = max(1, self._most) * max(1.0, room) if known else -(-self.global_batch // ranks)
            fits = int(min(by[rank], fits))
            limit = min(limit or fits, fits)
        for start, stop in self._spans(offset):
            small = stop - start < self.global_batch  # who asks for single samples gets them
            single = self.same_limit and self.limit == 1  # a batch is cut alike on every rank
            cut = self.least if small and not single else 1
            pieces = shares(start, stop, rank, ranks, limit, by, alike=alike, least=cut)
            least = self.least if limit != 1 and (small or len(pieces) > 1) else 1
            for number, (first, end) in enumerate(pieces, 1):
                # An empty share computes the batch's first samples with weight zero.
                positions = np.arange(first, end) if end > first else np.arange(start, stop)[:least]
                if len(positions) < least:  # the sample twice: the mean loss is that of the one
                    positions = np.repeat(positions, least)
                ids = self.order.at(epoch, positions)
                draws, last = Draws(self.order.seed, epoch, positions), number == len(pieces)
                tag = Batch((), end - first, stop - start, ids, stop, last, draws)
                yield Wanted(ids, draws, tag)


class Shard:
    """This rank's share of all samples in their stored order, for evaluation.

    Made by ``session.shard``; may be iterated over as often as is liked, from its beginning every
    time. It gives batches without augmentation, the same number on every rank (so that the model
    may communicate); where a share is used up, one of count 0. When ranks were lost meanwhile, the
    others go on with all samples of theirs, newly divided: also with those that they had seen, for
    what they measured is gone.

    Args:
        fetch: Turns ids into tensors.
        samples: Number of samples.
        place: Gives this rank and the number of ranks.
        size: Most samples in a batch.
        progress: Shared with the session.
        look_up: Called before each batch is given out.
        by: Gives the shares of the training, by which these are divided, too.
        slot: Number of this rank that never changes; the rank where there is none.
        meet: Gives the slots of all ranks that are there, in rank order: a collective. ``None``
            where ranks cannot be lost.
    """

    def __init__(
        self,
        fetch: Fetch,
        samples: int,
        place: Callable[[], tuple[int, int]],
        size: int,
        progress: Progress,
        look_up: Callable[[], None],
        by: Callable[[], Shares | None] = lambda: None,
        *,
        slot: int | None = None,
        meet: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._fetch, self._samples = fetch, samples
        self._progress, self._look_up = progress, look_up
        self._place, self._size, self._by = place, size, by
        self._slot, self._meet = slot, meet

    def __len__(self) -> int:
        """Batches of an iteration, the same on every rank (where none is lost)."""
        return self._samples and len(
            shares(0, self._samples, *self._place(), self._size, self._by())
        )

    def __iter__(self) -> Iterator[Batch]:
        before = self._progress.stand_in  # of the training, inside whose loop this may be
        there, by = self._there(), self._by()
        left: Spans = [(0, self._samples)] if self._samples else []
        held: dict[int, Spans] = {}  # what each rank has seen or is to see
        try:
            while left:
                by = by if by is not None and len(by) == len(there) else None
                whole = sum(end - start for start, end in left)
                for number, slot in enumerate(there):
                    (one,) = shares(0, whole, number, len(there), 0, by)
                    held[slot] = [*held.get(slot, ()), *_cut(left, *one)]
                yield from self._given(left, whole, there, by)
                there, by = self._there(), None
                left = [one for slot in [*held] if slot not in there for one in held.pop(slot)]
        finally:
            self._progress.stand_in = before

    def _there(self) -> Sequence[int]:
        return range(self._place()[1]) if self._meet is None else self._meet()

    def _given(
        self, left: Spans, whole: int, there: Sequence[int], by: Shares | None
    ) -> Iterator[Batch]:
        with closing(self._fetch(self._wanted(left, whole, there, by))) as made:
            for empty, data in made:
                self._progress.stand_in = not empty.count
                self._look_up()
                yield replace(empty, data=data)

    def _wanted(
        self, left: Spans, whole: int, there: Sequence[int], by: Shares | None
    ) -> Iterator[Wanted[Batch]]:
        """This rank's batches; of nothing where it is not there yet."""
        slot = self._place()[0] if self._slot is None or self._meet is None else self._slot
        number = there.index(slot) if slot in there else None
        for first, end in shares(0, whole, number or 0, len(there), self._size, by):
            mine = [] if number is None else _cut(left, first, end)
            ids = np.concatenate([np.arange(*one) for one in mine or [(0, 1)]])
            count = sum(stop - start for start, stop in mine)
            yield Wanted(ids, None, Batch((), count, self._samples, ids, end))


Spans = list[tuple[int, int]]


def _cut(spans: Spans, first: int, end: int) -> Spans:
    """The part from ``first`` to ``end`` of spans that are put one after the other."""
    found, at = [], 0
    for start, stop in spans:
        low, high = max(first, at), min(end, at + stop - start)
        if low < high:
            found.append((start + low - at, start + high - at))
        at += stop - start
    return found
