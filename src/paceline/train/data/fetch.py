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
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from paceline.spec.errors import PacelineError, SettingError
from paceline.train.data.order import Ids, Order, uniforms
from paceline.train.data.shards import ShardedDataset

T = TypeVar("T")
Collate = Callable[[list[Any]], Any]
"""From a list of samples to a batch: a tuple, a dictionary or one tensor."""
TaggedBatches = Generator[tuple[T, tuple[Any, ...]], None, None]
_RequestedBatches = Generator[tuple["BatchRequest[T]", tuple[Any, ...]], None, None]

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MAX_WORKERS = 8
_WORKER_EXIT_MESSAGE = "exited unexpectedly"  # says torch of a worker process
_WORKER_EXIT_S = 1.0  # from the end of a process's connections to its own, at most


@dataclass(frozen=True, slots=True)
class Draws:
    """Random numbers for the samples of a batch, the same whichever rank gets them.

    Attributes:
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


class Mapped(Protocol):
    """Any of torch's map-style data sets, and :class:`ShardedDataset`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Data = Batched | Mapped


def order_of(data: Data, seed: int, shuffle: bool) -> Order:
    """Returns the data set's own order, or one that shuffles freely."""
    visited = getattr(data, "visiting_order", None)
    return visited(seed, shuffle) if visited else Order(len(data), seed, shuffle)


@dataclass(frozen=True, slots=True)
class BatchRequest(Generic[T]):
    """A request for a batch.

    Attributes:
        ids: Sample ids, shape ``[n]``.
        draws: Randomness of the samples; ``None`` outside training.
        tag: Comes back with the batch.
    """

    ids: Ids
    draws: Draws | None
    tag: T


class Fetch:
    """Makes the batches of a data set, in the order in which they are requested.

    Args:
        data: A data set that makes batches, a ``TensorDataset``, or any map-style data set. A
            sample of the last kind that draws from Python's, numpy's or torch's generators gets the
            same numbers on whichever rank it is made.
        workers: Processes for map-style data sets; 0 makes everything in this one.
        collate: Makes a batch of a list of samples; torch's own way without.

    Raises:
        SettingError: This is no such data set.
    """

    def __init__(
        self, data: Data, device: torch.device, workers: int = 0, collate: Collate | None = None
    ) -> None:
        _check_data(data, collate)
        self._data, self._device, self._workers = data, device, workers
        self.kind = type(data).__name__  # class of the data set
        self._collate = _TupleCollate(collate or default_collate)
        self._make = _batch_maker(data, self._collate)
        self._sampler = _RequestSampler()
        self._loader: DataLoader[Any] | None = None
        # A copy from other memory is not asynchronous, whatever it is asked to be.
        self._pin = device.type in ("cuda", "xpu")

    def __call__(self, requests: Iterable[BatchRequest[T]]) -> TaggedBatches[T]:
        """Yields each request's tag with its tensors. Close it when it is not used up."""
        will_need = getattr(self._data, "will_need", None)
        finish = getattr(self._data, "on_device", None)
        hinted = with_prefetch_hints(requests, will_need) if will_need else requests
        with closing(self._batches_on_device(hinted)) as batches:
            for request, tensors in batches:
                yield request.tag, finish(tensors, request.draws) if finish else tensors

    def close(self) -> None:
        """Ends the worker processes; they start again when needed."""
        self._loader = None

    def _batches_on_device(self, requests: Iterable[BatchRequest[T]]) -> _RequestedBatches[T]:
        """Yields batches on the device; copied ahead of time if they are made ahead."""
        batches, is_ahead = self._host_batches(requests)
        if self._device.type == "cpu":
            return batches
        if is_ahead and self._pin:
            return _prefetch_to_device(batches, self._device)
        return _copy_to_device(batches, self._device, self._pin)

    def _host_batches(
        self, requests: Iterable[BatchRequest[T]]
    ) -> tuple[_RequestedBatches[T], bool]:
        """Returns batches in host memory, and whether other processes make them."""
        is_per_sample = isinstance(self._make, _SampleMaker)
        if self._workers and (is_per_sample or getattr(self._data, "processes", False)):
            return self._from_workers(requests), True
        if isinstance(self._make, _SampleMaker) and isinstance(self._data, ShardedDataset):
            return self._read_ahead(self._make, self._data, requests), False
        batches = ((request, self._make(request.ids, request.draws)) for request in requests)
        is_slow = getattr(self._data, "slow", False)
        return (prefetch(batches) if is_slow else batches), is_slow

    def _read_ahead(
        self, make: _SampleMaker, data: ShardedDataset, requests: Iterable[BatchRequest[T]]
    ) -> _RequestedBatches[T]:
        """Reads in a thread and decodes here: decoding may use this process's generators."""
        with closing(prefetch((request, data.raw(request.ids)) for request in requests)) as stored:
            for request, samples in stored:
                yield request, make.decode(request.ids, request.draws, samples)

    def _from_workers(self, requests: Iterable[BatchRequest[T]]) -> _RequestedBatches[T]:
        if self._loader is None:
            self._loader = DataLoader(
                _WorkerDataset(self._make),
                batch_size=None,  # an order is a batch
                sampler=self._sampler,
                num_workers=self._workers,
                collate_fn=_identity,
                persistent_workers=True,
                pin_memory=self._pin,
                # of its own: the script's generators must not depend on how often a run resumed
                generator=torch.Generator(),
            )
        self._sampler.requests, self._sampler.pending = requests, queue.SimpleQueue()
        iterator = iter(self._loader)
        try:
            for batch in iterator:
                if isinstance(batch, _FailedBatch):
                    raise batch.pop_error()
                yield self._sampler.pending.get(), tuple(batch)
        except (RuntimeError, OSError, EOFError) as error:
            is_disconnected = not isinstance(error, RuntimeError)
            if is_disconnected or _WORKER_EXIT_MESSAGE in str(error):
                workers = getattr(iterator, "_workers", ())
                if message := _kill_message(workers, wait=is_disconnected):
                    raise RuntimeError(message) from error
            raise


def _kill_message(workers: Iterable[BaseProcess], *, wait: bool = False) -> str:
    """Returns torch's message about a worker that a signal has ended; empty if there is none.

    torch says it where SIGCHLD tells it of the end, but not where it finds the process gone: then
    a worker that was ended from outside looks like one that has left by itself. ``wait``: what one
    of them was to send did not come, so its end may be near.
    """
    deadline = time.monotonic() + _WORKER_EXIT_S * wait
    while True:
        for worker in workers:
            if worker.exitcode is not None and worker.exitcode < 0:
                signal_name = signal.strsignal(-worker.exitcode)
                return f"DataLoader worker (pid {worker.pid}) is killed by signal: {signal_name}"
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.01)


def _copy_to_device(
    batches: _RequestedBatches[T], device: torch.device, pin: bool
) -> _RequestedBatches[T]:
    with closing(batches):
        for request, tensors in batches:
            yield request, tuple(_to_device(tensor, device, pin) for tensor in tensors)


def _prefetch_to_device(
    batches: _RequestedBatches[T], device: torch.device
) -> _RequestedBatches[T]:
    """Copies batches in a thread, on a stream of their own, while the device computes."""
    stream = torch.Stream(device)

    def copies() -> Iterator[tuple[BatchRequest[T], tuple[Any, ...], torch.Event]]:
        for request, tensors in batches:
            with stream:
                copied = tuple(_to_device(tensor, device, True) for tensor in tensors)
                event = stream.record_event()
            yield request, copied, event

    with closing(batches), closing(prefetch(copies())) as prefetched:
        for request, copied, event in prefetched:
            current_stream = torch.accelerator.current_stream(device)
            current_stream.wait_event(event)
            for tensor in _tensors(copied):
                # its memory is not used again before this stream is done
                tensor.record_stream(current_stream)
            yield request, copied


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def with_prefetch_hints(
    requests: Iterable[BatchRequest[T]], hint: Callable[[Ids], None], min_samples: int = 1024
) -> Iterator[BatchRequest[T]]:
    """Yields the same requests; ``hint`` gets ids at least ``min_samples`` ahead."""
    iterator = iter(requests)

    def next_group() -> list[BatchRequest[T]]:
        group: list[BatchRequest[T]] = []
        while sum(len(member.ids) for member in group) < min_samples:
            if (request := next(iterator, None)) is None:
                break
            group.append(request)
        if group:
            hint(np.concatenate([member.ids for member in group]))
        return group

    current, following = next_group(), next_group()
    while current:
        yield from current
        current, following = following, next_group()


def prefetch(items: Iterator[T]) -> Generator[T, None, None]:
    """Yields the same items, made in a thread up to two in advance."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(2)
    cancelled = threading.Event()

    def produce() -> None:
        try:
            for item in items:
                if not _put_item(ready, ("item", item), cancelled):
                    return
            _put_item(ready, ("end", None), cancelled)
        except BaseException as error:  # raised again where the item is wanted
            _put_item(ready, ("error", error), cancelled)

    thread = threading.Thread(target=produce, name="paceline-fetch", daemon=True)
    thread.start()
    try:
        while (message := ready.get())[0] == "item":
            yield message[1]
        if message[0] == "error":
            raise message[1]
    finally:
        cancelled.set()
        thread.join()


def _put_item(ready: queue.Queue[T], item: T, cancelled: threading.Event) -> bool:
    while not cancelled.is_set():
        try:
            ready.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _check_data(data: Data, collate: Collate | None) -> None:
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


def _batch_maker(data: Data, collate: _TupleCollate) -> Make:
    if isinstance(data, Batched):
        return data.batch
    if isinstance(data, TensorDataset) and collate.is_default:
        tensors = data.tensors
        return lambda ids, _: tuple(tensor[torch.from_numpy(ids)] for tensor in tensors)
    return _SampleMaker(data, collate)


@dataclass(frozen=True)
class _SampleMaker:
    """Makes a batch sample by sample, each with the randomness of its position."""

    data: Mapped
    collate: _TupleCollate

    def __call__(self, ids: Ids, draws: Draws | None) -> tuple[Any, ...]:
        samples = self.data.raw(ids) if isinstance(self.data, ShardedDataset) else None
        return self.decode(ids, draws, samples)

    def decode(self, ids: Ids, draws: Draws | None, samples: list[Any] | None) -> tuple[Any, ...]:
        """Makes a batch of ``samples`` as they were read, or of the data set's if ``None``.

        Restores this process's generators afterwards. Without draws, leaves them alone.
        """
        places = range(len(ids))
        if draws is None:
            return self.collate([self._decode_sample(ids, place, samples) for place in places])
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            decoded = []
            for place, seed in zip(places, draws.seeds(), strict=True):
                random.seed(seed)
                np.random.seed(seed)
                torch.default_generator.manual_seed(seed)
                decoded.append(self._decode_sample(ids, place, samples))
            return self.collate(decoded)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])

    def _decode_sample(self, ids: Ids, place: int, samples: list[Any] | None) -> Any:
        number = int(ids[place])
        if samples is not None and isinstance(self.data, ShardedDataset):
            return self.data.made(number, samples[place])
        return self.data[number]


class _WorkerDataset(Dataset[Any]):
    """Runs in a worker process: turns a request into a batch."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def __getitem__(self, order: tuple[Ids, Draws | None]) -> Any:
        try:
            return self._make(*order)
        except PacelineError as error:  # torch would wrap it into its own traceback's text
            return _FailedBatch(error)


class _FailedBatch:
    """A batch that could not be made."""

    def __init__(self, error: PacelineError) -> None:
        self._errors = [error]

    def pop_error(self) -> PacelineError:
        """Returns the error and forgets it, as it refers to this object."""
        return self._errors.pop()


def _identity(batch: Any) -> Any:
    return batch


class _RequestSampler:
    """Gives requests to torch as a sampler and keeps them for the batches to come."""

    def __init__(self) -> None:
        self.requests: Iterable[BatchRequest[Any]] = ()
        self.pending: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[tuple[Ids, Draws | None]]:
        for request in self.requests:
            self.pending.put(request)
            yield request.ids, request.draws


class _TupleCollate:
    """Collates samples and returns a batch as a tuple."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    @property
    def is_default(self) -> bool:
        return self._collate is default_collate

    def __call__(self, samples: list[Any]) -> tuple[Any, ...]:
        batch = self._collate(samples)
        return tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)


def _to_device(value: Any, device: torch.device, pin: bool) -> Any:
    """Returns the value with all its tensors on the accelerator.

    With ``pin``, copies by way of pinned memory, without waiting for the copy.
    """
    if isinstance(value, Mapping):
        return {name: _to_device(item, device, pin) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_device(item, device, pin) for item in value]
    if not isinstance(value, Tensor) or value.device == device:
        return value
    if value.device.type == "cpu" and pin:
        value = value if value.is_pinned() else value.pin_memory()
        return value.to(device, non_blocking=True)
    return value.to(device)


def usable_cpus() -> int:
    """Returns the number of CPUs by affinity and container quota, at least 1."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        count = os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no control groups, or "max"
        quota, period = _QUOTA.read_text().split()
        count = min(count, int(quota) // int(period))
    return max(1, count)


def loader_workers(cpus: int, local_ranks: int) -> int:
    """Returns loader processes for each rank: of the usable CPUs those that ranks leave free."""
    return max(0, min(MAX_WORKERS, cpus // local_ranks - 1))
