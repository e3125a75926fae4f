"""From sample ids to tensors: in this process, ahead of time, or in worker processes."""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from paceline.spec.errors import PacelineError, SettingError
from paceline.train.data.order import Ids, Order, uniforms

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]
"""From a list of samples to a batch: a tuple, a dictionary or one tensor."""
Made = Generator[tuple[T, tuple[Any, ...]], None, None]
_Answers = Generator[tuple["Wanted[T]", tuple[Any, ...]], None, None]

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MOST_WORKERS = 8
_LEFT = "exited unexpectedly"  # says torch of a worker process
_ENDING_S = 1.0  # from the end of a process's connections to its own, at most


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

    def normal(self, count: int) -> NDArray[np.float64]:
        """``count`` normally distributed numbers for each sample, shape ``[n, count]``.

        Others than :meth:`uniform` gives, so that they do not depend on augmentation.
        """
        both = uniforms(~self.seed, self.epoch, self.positions, 2 * count)
        radius = np.sqrt(-2 * np.log1p(-both[:, :count]))
        drawn: NDArray[np.float64] = radius * np.cos(2 * np.pi * both[:, count:])
        return drawn

    def seeds(self) -> list[int]:
        """A 32-bit seed for each sample."""
        return [int(number * 2**32) for number in self.uniform(1)[:, 0]]


@runtime_checkable
class Batched(Protocol):
    """A data set that makes whole batches (faster than one sample at a time).

    One that reads files sets ``slow = True``: its batches are then made ahead, in a thread; with
    ``processes = True``, too, in worker processes. What is best done on the accelerator is a method
    ``on_device(made, draws)``: it gets the batch where the network is, and gives the finished one.
    """

    def __len__(self) -> int: ...

    def batch(self, ids: Ids, draws: Draws | None) -> tuple[Tensor, ...]:
        """The samples ``ids`` as tensors whose first dimension is the sample.

        ``draws`` holds the randomness for augmentation; ``None`` asks for the plain samples.
        """
        ...


@runtime_checkable
class Stored(Protocol):
    """A data set that is read in one step, which may be done ahead, and decoded in another.

    See :class:`~paceline.train.data.shards.ShardedDataset`.
    """

    def __len__(self) -> int: ...

    def visiting_order(self, seed: int, shuffle: bool) -> Order:
        """The order in which its samples are visited."""
        ...

    def raw(self, ids: Ids) -> list[Any]:
        """Samples as they are stored."""
        ...

    def made(self, number: int, sample: Any, /) -> Any:
        """A sample, decoded."""
        ...


class Mapped(Protocol):
    """Any of torch's map-style data sets."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Data = Batched | Mapped | Stored


def order_of(data: Data, seed: int, shuffle: bool) -> Order:
    """The order in which a data set is visited: its own, or any sample after any other."""
    visited = getattr(data, "visiting_order", None)
    return visited(seed, shuffle) if visited else Order(len(data), seed, shuffle)


@dataclass(frozen=True, slots=True)
class Wanted(Generic[T]):
    """An order for a batch.

    Attributes:
        ids: Sample ids, shape ``[n]``.
        draws: Randomness of the samples; ``None`` outside training.
        tag: Comes back with the batch.
    """

    ids: Ids
    draws: Draws | None
    tag: T


class Fetch:
    """Makes the batches of a data set, in the order in which they are wanted.

    Args:
        data: A data set that makes batches, a ``TensorDataset``, a stored or any map-style data
            set. A sample of the last kinds that draws from Python's, numpy's or torch's generators
            gets the same numbers on whichever rank it is made.
        device: Where the tensors go.
        workers: Processes for map-style data sets; 0 makes everything in this one.
        collate: Makes a batch of a list of samples; torch's own way without.

    Raises:
        SettingError: This is no such data set.
    """

    def __init__(
        self,
        data: Data,
        device: torch.device,
        workers: int = 0,
        collate: Collate | None = None,
    ) -> None:
        _check(data, collate)
        self._data, self._device, self._workers = data, device, workers
        self._collate = _Collated(collate or default_collate)
        self._make = _maker(data, self._collate)
        self._orders = _Orders()
        self._loader: DataLoader[Any] | None = None
        # A copy from other memory is not asynchronous, whatever it is asked to be.
        self._pins = device.type in ("cuda", "xpu")

    def __call__(self, wanted: Iterable[Wanted[T]]) -> Made[T]:
        """Each order's tag with its tensors. Close it when it is not used up."""
        will_need = getattr(self._data, "will_need", None)
        finish = getattr(self._data, "on_device", None)
        orders = foretold(wanted, will_need) if will_need else wanted
        with closing(self._there(orders)) as made:
            for one, tensors in made:
                yield one.tag, finish(tensors, one.draws) if finish else tensors

    @property
    def kind(self) -> str:
        """Class of the data set."""
        return type(self._data).__name__

    def close(self) -> None:
        """Ends the worker processes; others are started where they are needed again."""
        self._loader = None

    def _there(self, orders: Iterable[Wanted[T]]) -> _Answers[T]:
        """Batches on the device; copied ahead of time where they are made ahead."""
        made, is_ahead = self._made(orders)
        if self._device.type == "cpu":
            return made
        if is_ahead and self._pins:
            return _copied_ahead(made, self._device)
        return _copied(made, self._device, self._pins)

    def _made(self, wanted: Iterable[Wanted[T]]) -> tuple[_Answers[T], bool]:
        """Batches in memory, and whether this process has nothing to do for them."""
        single = isinstance(self._make, _OneByOne)
        if self._workers and (single or getattr(self._data, "processes", False)):
            return self._from_workers(wanted), True
        if isinstance(self._make, _OneByOne) and isinstance(self._data, Stored):
            return self._read_ahead(self._make, self._data, wanted), False
        made = ((one, self._make(one.ids, one.draws)) for one in wanted)
        slow = getattr(self._data, "slow", False)
        return (ahead(made) if slow else made), slow

    def _read_ahead(
        self, make: _OneByOne, data: Stored, wanted: Iterable[Wanted[T]]
    ) -> _Answers[T]:
        """Only reading is done in a thread: decoding may draw from the process's generators."""
        with closing(ahead((one, data.raw(one.ids)) for one in wanted)) as read:
            for one, samples in read:
                yield one, make.decoded(one.ids, one.draws, samples)

    def _from_workers(self, wanted: Iterable[Wanted[T]]) -> _Answers[T]:
        if self._loader is None:
            self._loader = DataLoader(
                _Work(self._make),
                batch_size=None,  # an order is a batch
                sampler=self._orders,
                num_workers=self._workers,
                collate_fn=_as_made,
                persistent_workers=True,
                pin_memory=self._pins,
                # of its own: the script's generators must not depend on how often a run resumed
                generator=torch.Generator(),
            )
        self._orders.wanted, self._orders.given = wanted, queue.SimpleQueue()
        given = iter(self._loader)
        try:
            for made in given:
                if isinstance(made, _Failed):
                    raise made.take()
                yield self._orders.given.get(), tuple(made)
        except (RuntimeError, OSError, EOFError) as error:
            workers = getattr(given, "_workers", ())
            left = not isinstance(error, RuntimeError) or _LEFT in str(error)
            if left and (killed := _killed(workers, wait=not isinstance(error, RuntimeError))):
                raise RuntimeError(killed) from error
            raise


def _killed(workers: Iterable[BaseProcess], *, wait: bool = False) -> str:
    """Which signal has ended a worker process, in torch's words; empty where none has.

    torch says it where SIGCHLD tells it of the end, but not where it finds the process gone: then
    a worker that was ended from outside looks like one that has left by itself.

    Args:
        workers: All of them.
        wait: Something that one of them was to send did not come, so its end may be near.
    """
    until = time.monotonic() + _ENDING_S * wait
    while True:
        for one in workers:
            if one.exitcode is not None and one.exitcode < 0:
                how = signal.strsignal(-one.exitcode)
                return f"DataLoader worker (pid {one.pid}) is killed by signal: {how}"
        if time.monotonic() >= until:
            return ""
        time.sleep(0.01)


def _copied(made: _Answers[T], device: torch.device, pins: bool) -> _Answers[T]:
    with closing(made):
        for one, tensors in made:
            yield one, tuple(_moved(tensor, device, pins) for tensor in tensors)


def _copied_ahead(made: _Answers[T], device: torch.device) -> _Answers[T]:
    """The copies are begun in a thread, on a stream of their own, while the device computes."""
    stream = torch.Stream(device)

    def copies() -> Iterator[tuple[Wanted[T], tuple[Any, ...], torch.Event]]:
        for one, tensors in made:
            with stream:
                there = tuple(_moved(tensor, device, True) for tensor in tensors)
                event = stream.record_event()
            yield one, there, event

    with closing(made), closing(ahead(copies())) as begun:
        for one, there, event in begun:
            now = torch.accelerator.current_stream(device)
            now.wait_event(event)
            for tensor in _tensors(there):
                tensor.record_stream(now)  # its memory is not used again before this stream is done
            yield one, there


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


_FORETOLD = 1024  # samples, at least


def foretold(
    wanted: Iterable[Wanted[T]], tell: Callable[[Ids], None], samples: int = _FORETOLD
) -> Iterator[Wanted[T]]:
    """The same orders; ``tell`` hears of ids when at least so many samples come before them."""
    orders = iter(wanted)

    def more() -> list[Wanted[T]]:
        found: list[Wanted[T]] = []
        while sum(len(one.ids) for one in found) < samples:
            if (one := next(orders, None)) is None:
                break
            found.append(one)
        if found:
            tell(np.concatenate([one.ids for one in found]))
        return found

    now, then = more(), more()
    while now:
        yield from now
        now, then = then, more()


def ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """The same items, made in a thread up to two in advance."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(2)
    unwanted = threading.Event()

    def work() -> None:
        try:
            for item in items:
                if not _put(ready, ("item", item), unwanted):
                    return
            _put(ready, ("end", None), unwanted)
        except BaseException as error:  # raised again where the item is wanted
            _put(ready, ("error", error), unwanted)

    thread = threading.Thread(target=work, name="paceline-fetch", daemon=True)
    thread.start()
    try:
        while (message := ready.get())[0] == "item":
            yield message[1]
        if message[0] == "error":
            raise message[1]
    finally:
        unwanted.set()
        thread.join()


def _put(ready: queue.Queue[T], item: T, unwanted: threading.Event) -> bool:
    while not unwanted.is_set():
        try:
            ready.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _check(data: Data, collate: Collate | None) -> None:
    if isinstance(data, (DataLoader, IterableDataset)) or not hasattr(data, "__len__"):
        raise SettingError(
            "the data must be a data set with a length and numbered samples",
            found=f"a {type(data).__name__}",
            remedy="give the data set itself, not a DataLoader; of a stream make a list, or shards"
            " (train.write_shards, train.ShardedDataset)",
        )
    if collate is not None and isinstance(data, Batched):
        raise SettingError(
            f"collate cannot be used with {type(data).__name__}, which makes whole batches itself",
            remedy="leave collate out, or leave out the method batch",
        )


Make = Callable[[Ids, Draws | None], tuple[Any, ...]]


def _maker(data: Data, collate: _Collated) -> Make:
    if isinstance(data, Batched):
        return data.batch
    if isinstance(data, TensorDataset) and collate.is_default:
        tensors = data.tensors
        return lambda ids, _: tuple(one[torch.from_numpy(ids)] for one in tensors)
    return _OneByOne(data, collate)


@dataclass(frozen=True)
class _OneByOne:
    """Makes a batch sample by sample; each has randomness of its own place in the order."""

    data: Mapped | Stored
    collate: _Collated

    def __call__(self, ids: Ids, draws: Draws | None) -> tuple[Any, ...]:
        samples = self.data.raw(ids) if isinstance(self.data, Stored) else None
        return self.decoded(ids, draws, samples)

    def decoded(self, ids: Ids, draws: Draws | None, samples: list[Any] | None) -> tuple[Any, ...]:
        """Afterwards this process's generators are as if nothing had been drawn.

        Args:
            ids: Sample ids.
            draws: Their randomness; ``None`` leaves the generators alone.
            samples: As they were read, of a stored data set.
        """
        numbers = ids.tolist()
        if draws is None:
            return self.collate([self._one(n, place, samples) for place, n in enumerate(numbers)])
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            made = []
            for place, (number, seed) in enumerate(zip(numbers, draws.seeds(), strict=True)):
                random.seed(seed)
                np.random.seed(seed)
                torch.default_generator.manual_seed(seed)
                made.append(self._one(number, place, samples))
            return self.collate(made)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def _one(self, number: int, place: int, samples: list[Any] | None) -> Any:
        if samples is not None and isinstance(self.data, Stored):
            return self.data.made(number, samples[place])
        return self.data[number]  # type: ignore[index]


class _Work(Dataset[Any]):
    """What a worker process does: an order in, a batch out."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def __getitem__(self, order: tuple[Ids, Draws | None]) -> Any:
        try:
            return self._make(*order)
        except PacelineError as error:  # torch would wrap it into its own traceback's text
            return _Failed(error)


class _Failed:
    """A batch that could not be made."""

    def __init__(self, error: PacelineError) -> None:
        self._errors = [error]

    def take(self) -> PacelineError:
        """The error, which then holds what holds this, and would keep the workers for long."""
        return self._errors.pop()


def _as_made(batch: Any) -> Any:
    return batch


class _Orders:
    """The orders as torch's sampler; they are kept for the batches to come."""

    def __init__(self) -> None:
        self.wanted: Iterable[Wanted[Any]] = ()
        self.given: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[tuple[Ids, Draws | None]]:
        for one in self.wanted:
            self.given.put(one)
            yield one.ids, one.draws


class _Collated:
    """A batch as a tuple, whatever the data set's samples are."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    @property
    def is_default(self) -> bool:
        return self._collate is default_collate

    def __call__(self, samples: list[Any]) -> tuple[Any, ...]:
        made = self._collate(samples)
        return tuple(made) if isinstance(made, (list, tuple)) else (made,)


def _moved(value: Any, device: torch.device, pins: bool) -> Any:
    """The value with all its tensors on the device.

    Args:
        value: Tensors, and lists and dictionaries of them.
        device: An accelerator.
        pins: Copies by way of pinned memory, and then without waiting for the copy.
    """
    if isinstance(value, Mapping):
        return {name: _moved(one, device, pins) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_moved(one, device, pins) for one in value]
    if not isinstance(value, Tensor) or value.device == device:
        return value
    if value.device.type == "cpu" and pins:
        value = value if value.is_pinned() else value.pin_memory()
        return value.to(device, non_blocking=True)
    return value.to(device)


def allowed() -> int:
    """CPUs by affinity and by the container's quota, at least 1."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        count = os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no control groups, or "max"
        quota, period = _QUOTA.read_text().split()
        count = min(count, int(quota) // int(period))
    return max(1, count)


def loader_workers(cpus: int, local_ranks: int) -> int:
    """Loader processes for each rank: what the ranks of the node leave free.

    Args:
        cpus: CPUs that this process may use. Where launchers bind ranks these are its own.
        local_ranks: Ranks that share them.
    """
    return max(0, min(MOST_WORKERS, cpus // local_ranks - 1))
