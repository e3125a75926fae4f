"""Where the time of each step goes, on every rank, and how fast the training is.

After its backward pass a rank stands still until the gradients of all ranks are there, and before a
forward pass with buffers until rank 0's are. The last to arrive sees the moving of bytes alone;
what the others stand still longer, they waited for it. So no clocks are compared: every rank notes
how long it stood still, and the notes are gathered at the end of one step and read at the end of
the next, when they have long arrived.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from paceline.spec import events
from paceline.spec.formatting import format_duration, pluralize
from paceline.train.comms import Comms
from paceline.train.elastic import waits
from paceline.train.measure.vitals import VITALS, Vitals
from paceline.train.parallel import Replica, is_sharded

PARTS = events.PARTS
"""What a step consists of.

``data``: waiting for the rank's own data; ``computing``: forward and backward pass, the optimizer
and the script's own work, in callbacks, too; ``waiting``: for ranks that came later, where
gradients are exchanged or ranks tell each other something else; ``moving``: gradients and buffers
are on their way and nothing else happens; ``saving``: a checkpoint holds the step up; ``other``:
the session's own records and proofs.
"""
_DATA, _COMPUTING, _WAITING, _MOVING, _SAVING, _SESSION_WORK = range(len(PARTS))

_MIN_BUSY_PART = 0.1  # of the most samples of a rank: who has fewer had nothing to do in most steps
_INITIAL_INTERVAL = 5  # steps between two looks, at first
_MAX_INTERVAL = 512
_MAX_OVERHEAD = 0.005  # part of the time that looks may take
_NOTE_SECONDS, _NOTE_OVERHEAD = 2e-5, 100  # a note's cost, and the least time of a step beside it
_SUMMARY_PARTS = ("data", "waiting", "moving", "computing", "saving", "other")  # in this order


@dataclass(frozen=True, slots=True, eq=False)
class StepTimings:
    """Times of the parts of some steps on all ranks; the same on every rank.

    Attributes:
        first_step: Number of the first of the steps, from 0, of the whole training.
        seconds: Of each part (:data:`PARTS`), shape ``[ranks, steps, parts]``, float64.
        samples: That each rank computed, shape ``[ranks, steps]``, float64.
        elements: Numbers in these samples (tokens, pixels), padding included; likewise.
        vitals: What each rank saw of its process and host since the last look, shape
            ``[ranks, vitals]``; see :data:`paceline.train.measure.vitals.VITALS`.
        stride: Only each so-manieth step is in it.
    """

    first_step: int
    seconds: Tensor
    samples: Tensor
    elements: Tensor = field(default_factory=lambda: torch.empty(0))
    vitals: Tensor = field(default_factory=lambda: torch.empty(0))
    stride: int = 1

    def summary(self) -> dict[str, list[Any]]:
        """Returns mean seconds of each part and samples a second by rank, for the launcher."""
        seconds, samples = self.seconds.mean(dim=1), self.samples.mean(dim=1)
        rates = samples / seconds.sum(dim=1).clamp(min=1e-9)
        return {
            "ranks_s": [[round(value, 6) for value in row] for row in seconds.tolist()],
            "rates": [round(value, 2) for value in rates.tolist()],
        }


def active_ranks(timings: Sequence[StepTimings]) -> list[int]:
    """Returns the ranks that have samples; compared with a dropped rank all would be slow."""
    return [rank for rank, samples in enumerate(timings[-1].samples.sum(dim=1).tolist()) if samples]


def combined_vitals(timings: Sequence[StepTimings]) -> Tensor:
    """Adds up the vitals of several timings, shape ``[ranks, vitals]``."""
    stacked = torch.stack([part.vitals for part in timings])
    total = stacked.nansum(dim=0).where(~stacked.isnan().all(dim=0), math.nan)
    for name in ("here", "there", "swapped"):  # no differences
        total[:, VITALS.index(name)] = stacked[-1, :, VITALS.index(name)]
    return total


def num_steps(timings: Sequence[StepTimings]) -> int:
    """Returns how many steps these timings stand for, including those that are not noted."""
    return sum(part.samples.shape[1] * part.stride for part in timings)


class _CpuClock:
    """Timestamps of the CPU, in seconds."""

    @staticmethod
    def mark() -> Any:
        return time.perf_counter()

    @staticmethod
    def between(first: Any, second: Any) -> float:
        return float(second - first)


class _DeviceClock:
    """Timestamps in an accelerator's stream, read only when they are long past."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.get_device_module(device).Event
        self._event(enable_timing=True)  # or an error, where it has no such clock

    def mark(self) -> Any:
        event = self._event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def between(first: Any, second: Any) -> float:
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


@dataclass(slots=True)
class _Note:
    """Timestamps and seconds of one step. Timestamps are the clock's, seconds the CPU's."""

    step: int
    start: Any
    first_batch: Any = None  # the first batch was there
    end: Any = None
    data: float = 0.0
    saving: float = 0.0
    session_work: float = 0.0
    communication: float = 0.0  # in what ranks tell each other besides gradients
    script_work: float = 0.0  # in the script's callbacks
    samples: int = 0
    elements: int = 0


_NUM_TIMES = 6  # of a note as it is sent: whole, data, standing still, saving, other, met
_NUM_COLUMNS = _NUM_TIMES + 2  # and samples, elements


class StepTimer:
    """Times the steps of one rank. Every rank has one and calls it in the same order.

    Args:
        model: What is trained. Of sharded models it is not known what part of a pass was waiting:
            they give no looks.

    Attributes:
        max_interval: Steps between two looks, at most.
        totals: Of all steps so far; ``None``: not known.
    """

    def __init__(self, comms: Comms, model: nn.Module, device: torch.device | None = None) -> None:
        self._comms, self._device = comms, device or comms.device
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        self._model, self.rate, self.max_interval = model, Rate(), _MAX_INTERVAL
        self.regroup()

    def regroup(self) -> None:
        """Starts again in a new group of ranks; only the rate continues."""
        comms, model = self._comms, self._model
        self._ddp = isinstance(model, DistributedDataParallel) and not comms.is_alone
        self._clock: _CpuClock | _DeviceClock | None = _clock(self._device)
        if is_sharded(model) or not (comms.is_alone or self._ddp):
            self._clock = None
        if isinstance(model, Replica) and self._clock is not None:
            model.timestamp = self._clock.mark
        self._interval, self._stride = _INITIAL_INTERVAL, 1  # steps between two looks, two notes
        self._stalls: list[tuple[Any, Any]] = []
        self._stall_start: Any = None
        self._data_s, self._saving_s, self._session_work_start = 0.0, 0.0, 0.0
        self._communication_s = self._communication_start = comms.waited_s
        self._note = self._new_note(0)
        self._finished_notes: list[tuple[_Note, list[tuple[Any, Any]]]] = []
        self._pending_gather: _PendingGather | None = None
        self._overhead_s, self._gather_cost_s = 0.0, math.inf  # of notes: since a look, usually
        self._vitals = Vitals(threads=torch.get_num_threads()) if self._ddp else None
        self.totals: Totals | None = None
        self._unrecorded_totals: Totals | None = None  # of them not recorded yet

    def _new_note(self, step: int) -> _Note:
        return _Note(step, self._clock.mark() if self._clock else None)

    def restart(self, data_s: float, saving_s: float = 0.0) -> None:
        """Leaves out time that was not spent on training; arguments as in :meth:`step`."""
        self._note, self._data_s, self._saving_s = self._new_note(self._note.step), data_s, saving_s
        self._communication_s = self._comms.waited_s
        self._start_session_work()
        self._stalls.clear()
        if isinstance(self._model, Replica):
            self._model.stalls.clear()
        self.rate.restart()

    def _start_session_work(self) -> None:
        """Marks the start of the session's own work, up to :meth:`end_session_work`."""
        self._session_work_start = time.perf_counter()
        self._communication_start = self._comms.waited_s

    def mark_batch(self) -> None:
        """Marks the moment at which the script gets a batch."""
        if self._note.first_batch is None and isinstance(self._clock, _DeviceClock):
            self._note.first_batch = self._clock.mark()

    def add_batch(self, count: int, data: Any) -> None:
        self._note.samples += count
        self._note.elements += count_elements(data)

    def start_backward(self, loss: Tensor, step: int) -> None:
        """Prepares timing of a backward pass that exchanges gradients."""
        self._note.step, self._stall_start = step, None
        if self._clock and self._ddp and loss.requires_grad and step % self._stride == 0:
            loss.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: Tensor) -> None:
        # The engine calls these at the end of its work in the order in which they came; DDP's,
        # which waits for the exchange, comes later.
        Variable._execution_engine.queue_callback(self.mark_backward_end)

    def mark_backward_end(self) -> None:
        """Marks the moment at which a pass has computed its last gradient."""
        assert self._clock is not None
        self._stall_start = self._clock.mark()

    def end_backward(self) -> None:
        if self._stall_start is not None and self._clock is not None:
            self._stalls.append((self._stall_start, self._clock.mark()))
            self._stall_start = None  # the pieces of the next batch have a backward pass, too

    def step(self, samples: int, data_s: float, saving_s: float = 0.0) -> StepTimings | None:
        """Ends a global step.

        Args:
            data_s: Seconds in which this rank waited for its data, from its beginning.
            saving_s: Seconds in which checkpoints held it up, from its beginning.

        Returns:
            Now and then a look at the last steps: the same, at the same step, on every rank.
        """
        self.rate.add(samples)
        if self._clock is None:
            return None
        note, overhead_start, timings = self._note, time.perf_counter(), None
        note.end, note.data = self._clock.mark(), data_s - self._data_s
        note.saving, self._data_s, self._saving_s = saving_s - self._saving_s, data_s, saving_s
        waited_s = self._comms.waited_s
        note.communication, self._communication_s = waited_s - self._communication_s, waited_s
        self._note = _Note(note.step + 1, note.end)
        if note.step % self._stride == 0:
            buffer_stalls = self._model.stalls if isinstance(self._model, Replica) else ()
            self._finished_notes.append((note, [*self._stalls, *buffer_stalls]))
            if self._pending_gather is not None:
                timings = self._collect()
            if len(self._finished_notes) >= self._interval:
                self._send()
        self._stalls.clear()
        if isinstance(self._model, Replica):
            self._model.stalls.clear()
        self._start_session_work()
        self._overhead_s += self._session_work_start - overhead_start
        return timings

    @contextlib.contextmanager
    def script_work(self) -> Iterator[None]:
        """Context whose time counts as the script's although the session is at work."""
        start, communication_start = time.perf_counter(), self._comms.waited_s
        try:
            yield
        finally:
            communication_s = self._comms.waited_s - communication_start
            self._note.script_work += time.perf_counter() - start - communication_s

    def last_computing_s(self) -> float:
        """Returns seconds of computing in the last step; 0 if unknown."""
        if not (self._finished_notes and self._finished_notes[-1][0].step == self._note.step - 1):
            return 0.0
        total_s, *other_parts = self._row(*self._finished_notes[-1])[:_NUM_TIMES]
        return max(0.0, total_s - sum(other_parts))

    def end_session_work(self, saving_s: float = 0.0) -> None:
        """Ends the session's own work after a step."""
        note, elapsed_s = self._note, time.perf_counter() - self._session_work_start
        communication_s = self._comms.waited_s - self._communication_start  # also the script's
        excluded_s = saving_s - self._saving_s + note.script_work + communication_s
        note.session_work = max(0.0, elapsed_s - excluded_s)

    def _send(self, *, include_last: bool = False) -> None:
        # What an accelerator does of the last step is not over yet.
        is_delayed = isinstance(self._clock, _DeviceClock) or self._comms.mixed
        count = len(self._finished_notes) - (is_delayed and not include_last)
        finished, self._finished_notes = self._finished_notes[:count], self._finished_notes[count:]
        columns = torch.tensor([self._row(*entry) for entry in finished], dtype=torch.float64)
        vitals = self._vitals.read() if self._vitals else [math.nan] * len(VITALS)
        tail = torch.tensor([self._overhead_s, *vitals], dtype=torch.float64)
        vector = torch.cat([columns.flatten(), tail])
        self._overhead_s = 0.0
        self._pending_gather = _PendingGather(self._comms, vector, finished[0][0].step, count)

    def _row(self, note: _Note, stalls: list[tuple[Any, Any]]) -> tuple[float, ...]:
        assert self._clock is not None
        between = self._clock.between
        data_s, saving_s, communication_s = note.data, note.saving, note.communication
        session_s = note.session_work
        if isinstance(self._clock, _DeviceClock):  # only while it had nothing to do
            idle_s = 0.0 if note.first_batch is None else between(note.start, note.first_batch)
            data_s = min(data_s, idle_s)
            saving_s = min(saving_s, idle_s - data_s)
            communication_s = min(communication_s, idle_s - data_s - saving_s)
            session_s = max(0.0, idle_s - data_s - saving_s - communication_s - note.script_work)
        stall_s = sum(between(*stall) for stall in stalls)
        seconds = between(note.start, note.end), data_s, stall_s, saving_s, session_s
        return *seconds, communication_s, note.samples, note.elements

    def _collect(self) -> StepTimings | None:
        """Returns the notes of all ranks as timings; ``None`` if a rank was lost meanwhile."""
        assert self._pending_gather is not None
        start, pending, self._pending_gather = time.perf_counter(), self._pending_gather, None
        rows, count = pending.rows(), pending.count
        if rows is None:
            return None
        notes_end = count * _NUM_COLUMNS
        notes = rows[:, :notes_end].reshape(-1, count, _NUM_COLUMNS)
        # What it costs on a rank that nobody disturbs.
        self._gather_cost_s = min(1.5 * self._gather_cost_s, float(rows[:, notes_end].min()))
        vitals = rows[:, notes_end + 1 :]
        seconds = split_parts(notes[:, :, :_NUM_TIMES])
        samples, numbers = notes[:, :, _NUM_TIMES:].unbind(2)
        timings = StepTimings(pending.first, seconds, samples, numbers, vitals, self._stride)
        totals = Totals(seconds.sum(dim=1), count, samples.sum(dim=1))
        self.totals = totals if self.totals is None else self.totals + totals
        unrecorded = self._unrecorded_totals
        self._unrecorded_totals = totals if unrecorded is None else unrecorded + totals
        step_s = max(float(notes[:, :, 0].mean()), 1e-9)
        stride = max(1, int(_NOTE_SECONDS * _NOTE_OVERHEAD / step_s))
        if stride != self._stride:
            self._stride = stride
            self._finished_notes.clear()  # the steps of a look are equally far apart
        interval = int(self._gather_cost_s / (_MAX_OVERHEAD * step_s * self._stride))
        self._interval = min(self.max_interval, max(_INITIAL_INTERVAL, interval))
        self._overhead_s += time.perf_counter() - start
        return timings

    def finish(self) -> list[StepTimings]:
        collected = [] if self._pending_gather is None else [self._collect()]
        if self._finished_notes:
            self._send(include_last=True)
            collected.append(self._collect())
        return [timings for timings in collected if timings is not None]

    def figures(self) -> dict[str, Any]:
        """Returns metrics since the last call; empty if there are no new timings.

        Seconds of a step in each part (``computing_s``), as a mean over the ranks and over the
        steps ``noted``; ``ranks_s``: those of each rank, in the order of :data:`PARTS`.
        """
        totals, self._unrecorded_totals = self._unrecorded_totals, None
        if totals is None:
            return {}
        seconds = totals.seconds / totals.steps
        means_by_part = zip(PARTS, seconds.mean(dim=0).tolist(), strict=True)
        means = {f"{name}_s": round(value, 6) for name, value in means_by_part}
        ranks = [[round(value, 6) for value in row] for row in seconds.tolist()]
        return {"noted": totals.steps, **means} | ({"ranks_s": ranks} if len(ranks) > 1 else {})


class _PendingGather:
    """Notes of ``count`` steps of this rank on their way to all others."""

    def __init__(self, comms: Comms, vector: Tensor, first: int, count: int) -> None:
        self.first, self.count, self._comms = first, count, comms
        self._is_lost = comms.stale  # then some ranks have sent theirs to a former group
        if self._is_lost:
            return
        try:
            self._rows, self._wait = _start_gather(comms, vector)
        except RuntimeError:
            if comms.fault_handler is None:
                raise
            self._is_lost = True  # what is done next together finds that out, too

    def rows(self) -> Tensor | None:
        """Returns all ranks' notes on the CPU; ``None`` if a rank was lost meanwhile."""
        return self._comms.event(self._wait_for_rows)

    def _wait_for_rows(self) -> Tensor | None:
        """Waits for the rows, then for all ranks: the rows were sent steps ago."""
        rows = None
        if not (self._is_lost or self._comms.stale):
            self._wait()
            rows = torch.stack(list(self._rows)).clone()
        self._comms.wait_for_all()
        return rows


def _start_gather(comms: Comms, vector: Tensor) -> tuple[Sequence[Tensor], Callable[[], object]]:
    """Returns rows of all ranks, and a function that waits until they are filled."""
    size, device = comms.world.size, comms.message_device
    if comms.is_alone:
        return [vector], lambda: None
    if device.type == "cpu":
        rows = [torch.empty_like(vector) for _ in range(size)]
        work = dist.all_gather(rows, vector, group=comms.group, async_op=True)
        if work is not None:
            waits.abandon(work)  # where a rank is lost it stays
        return rows, lambda: waits.wait(work, vector)
    # In a stream of its own: neither the CPU nor the training's stream waits for it.
    library = torch.get_device_module(device)
    host_rows = torch.empty(size, len(vector), dtype=vector.dtype, pin_memory=True)
    with library.stream(library.Stream(device)):
        local_row = vector.pin_memory().to(device, non_blocking=True)
        # flat: so gloo, too, takes it
        device_rows = torch.empty(size * len(vector), dtype=vector.dtype, device=device)
        work = dist.all_gather_into_tensor(device_rows, local_row, group=comms.group, async_op=True)
        work.wait()
        host_rows.view(-1).copy_(device_rows, non_blocking=True)
        finished = library.Event()
        finished.record()

    def wait(references: object = (local_row, device_rows)) -> None:
        finished.synchronize()

    return list(host_rows), wait


def _clock(device: torch.device) -> _CpuClock | _DeviceClock | None:
    if device.type == "cpu":
        return _CpuClock()
    with contextlib.suppress(Exception):  # whatever this torch and driver say
        return _DeviceClock(device)
    return None


def count_elements(data: Any) -> int:
    if isinstance(data, Tensor):
        return data.numel()
    if isinstance(data, Mapping):
        data = data.values()
    elif not isinstance(data, (tuple, list)):
        return 0
    return sum(count_elements(item) for item in data)


def split_parts(notes: Tensor) -> Tensor:
    """Splits the steps of all ranks into their parts.

    Args:
        notes: Seconds of each rank and step: the whole step, waiting for data, standing still
            for gradients and buffers, saving, other, in what ranks tell each other besides; shape
            ``[ranks, steps, 6]``.

    Returns:
        Seconds of :data:`PARTS`, shape ``[ranks, steps, 6]``.
    """
    total, data, stall, saving, session_work, communication = notes.unbind(2)
    moving = stall.min(dim=0, keepdim=True).values.expand_as(stall)
    min_communication = communication.min(dim=0, keepdim=True).values.expand_as(communication)
    computing = (total - data - stall - saving - session_work - communication).clamp(min=0)
    waiting = stall - moving + communication - min_communication
    session_work = session_work + min_communication
    return torch.stack([data, computing, waiting, moving, saving, session_work], dim=2)


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """The sum of several timings: seconds by rank and part, number of steps, samples by rank."""

    seconds: Tensor
    steps: int
    samples: Tensor

    def __add__(self, other_totals: Totals) -> Totals:
        samples = self.samples + other_totals.samples
        return Totals(self.seconds + other_totals.seconds, self.steps + other_totals.steps, samples)

    def shares(self) -> dict[str, float]:
        """Returns parts of the time of the busy rank that waited most for others."""
        is_busy = self.samples >= _MIN_BUSY_PART * self.samples.max()
        waiting_s = self.seconds[:, _WAITING].where(is_busy, -1.0)
        rank = int(waiting_s.argmax())
        parts = self.seconds[rank] / self.seconds[rank].sum().clamp(min=1e-9)
        return dict(zip(PARTS, parts.tolist(), strict=True))


class Rate:
    """Global samples a second of training time."""

    def __init__(self) -> None:
        self.samples_per_s = 0.0  # at the last measurement; 0 before the first
        self.measured_s, self.measured_samples = 0.0, 0  # in all, up to it
        self._start: float | None = time.perf_counter()
        self._unmeasured_samples, self._elapsed_s = 0, 0.0  # since it; until the last pause

    def add(self, samples: int) -> None:
        self._unmeasured_samples += samples

    def measure(self) -> float:
        was_running = self._start is not None
        self.pause()
        if was_running:
            self.restart()
        elapsed_s = max(self._elapsed_s, 1e-9)
        self.samples_per_s = self._unmeasured_samples / elapsed_s
        self.measured_s += elapsed_s
        self.measured_samples += self._unmeasured_samples
        self._unmeasured_samples, self._elapsed_s = 0, 0.0
        return self.samples_per_s

    def pause(self) -> None:
        """Stops the clock until :meth:`restart`."""
        if self._start is not None:
            self._elapsed_s += time.perf_counter() - self._start
            self._start = None

    def restart(self) -> None:
        self._start = time.perf_counter()


def summary(
    steps: int,
    samples: int,
    seconds: float,
    data_s: float,
    shares: Mapping[str, float] | None,
    slowest: str = "",
) -> str:
    """Summarises a training in one line, and a second one about its straggler.

    Args:
        steps: Done in this process's life.
        samples: Of these steps, over all ranks; 0 if too few were done to measure a speed.
        data_s: Seconds of these in which rank 0 waited for data.
        shares: Parts of the time; ``None`` where they are not known.
    """
    if not samples:
        return f"trained {pluralize(steps, 'step')}"
    seconds = max(seconds, 1e-9)
    if shares is None:
        parts = f"waiting for data {min(1.0, data_s / seconds):.0%}"
    else:
        parts = ", ".join(
            f"{events.PART_NAMES[name]} {shares[name]:.0%}" for name in _SUMMARY_PARTS
            if shares[name] >= 0.005 or name not in ("saving", "other")
        )  # fmt: skip
    text = (
        f"trained {pluralize(steps, 'step')}, {pluralize(samples, 'sample')} in"
        f" {format_duration(seconds)}: {samples / seconds:,.0f} samples/s ({parts})"
    )
    return f"{text}\n{slowest}" if slowest else text
