"""Measures a few steps instead of a training, for ``paceline forecast``.

The script runs as always up to its first steps. These take several global batch sizes in turn,
which shows how much of a step grows with the batch. Then the ranks time an all-reduce of as many
bytes as the gradients have, rank 0 writes all of it to the run directory, and the script ends.
Nothing is saved, resumed or tracked.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.spec import jobenv, rundir
from paceline.spec.errors import SettingError
from paceline.spec.training import communication
from paceline.train import files, parallel
from paceline.train.data.division import BalanceMode
from paceline.train.data.loader import Loader
from paceline.train.elastic.stop import QuietExit
from paceline.train.member import Member
from paceline.train.models import Models
from paceline.train.reduce.exchange import GradientExchange
from paceline.train.reduce.registry import REDUCERS

WARMUP_STEPS = 4
"""Steps before anything counts."""
TUNED_WARMUP_STEPS = 24
"""Steps before anything counts if methods of averaging are tried, or begin with exact steps."""
COUNTED_STEPS = 3
"""Steps of a batch size in a round, after one that does not count: buffers are made anew."""
NUM_ROUNDS = 8
_NUM_SMALL_REDUCES = 12  # all-reduces of a single number
_SMALL_REDUCE_BYTES = 1 << 20  # bytes of the first larger one
_LARGE_REDUCE_S = 1.0  # duration of one of the largest, at most
_NUM_LARGE_REDUCES = 3


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Measurements that the environment asks for.

    Attributes:
        batches: Global batch sizes to try.
        fractions: Further ones, as fractions of the training's own.
        seconds: Time after which no further round begins.
    """

    batches: tuple[int, ...]
    fractions: tuple[float, ...]
    seconds: float

    def global_batches(self, global_batch: int, num_samples: int, ranks: int) -> tuple[int, ...]:
        """Returns the batches to try for a training of this batch size, each once."""
        sizes = [*self.batches, *(round(part * global_batch) for part in self.fractions)]
        sizes = sizes or [global_batch]
        return tuple(dict.fromkeys(min(max(size, ranks, 1), num_samples) for size in sizes))


def probe_request(environ: Mapping[str, str]) -> ProbeRequest | None:
    """Reads the request from the environment; ``None`` for a normal training.

    Raises:
        SettingError: The variable holds no request.
    """
    text = environ.get(jobenv.PROBE, "")
    if not text:
        return None
    try:
        request = json.loads(text)
        batches = tuple(map(int, request["batches"]))
        fractions = tuple(map(float, request["parts"]))
        return ProbeRequest(batches, fractions, float(request["seconds"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise SettingError(
            f"{jobenv.PROBE} is not valid",
            found=text[:200],
            remedy=f"unset {jobenv.PROBE}; paceline forecast sets it for its own runs",
        ) from None


class ProbeLoader(Loader):
    """The training's loader with changing global batch sizes.

    Attributes:
        sizes: Global batch sizes to try; the same on each rank.
        warmup_steps: Steps with the first of them, before any round.
    """

    sizes: tuple[int, ...] = ()
    warmup_steps = WARMUP_STEPS

    def size_of(self, step: int) -> int:
        return self.sizes[max(step - self.warmup_steps, 0) // (1 + COUNTED_STEPS) % len(self.sizes)]

    def _global_batches(self, offset: int) -> Iterator[tuple[int, int]]:
        step = self.progress.step
        while offset < self.order.size:
            stop = min(offset + self.size_of(step), self.order.size)
            yield offset, stop
            offset, step = stop, step + 1


class Probe:
    """Measures steps on one rank. Every rank has one and calls it in the same order."""

    def __init__(self, request: ProbeRequest, member: Member, models: Models) -> None:
        self._request, self._member, self._models = request, member, models
        self._description: dict[str, Any] = {}
        self._sizes: tuple[int, ...] = ()
        self._balance: BalanceMode = "even"
        self._notes: list[tuple[float, float, float, float, float]] = []
        self._started_at = self._step_start = time.perf_counter()
        self._data_s, self._last_samples = 0.0, 0
        self._steps_per_round, self._warmup_steps = 1, WARMUP_STEPS

    def loader(self, *args: Any) -> ProbeLoader:
        """Makes a loader; arguments as of :class:`Loader`."""
        loader = ProbeLoader(*args)
        ranks = self._member.world.size
        loader.sizes = self._request.global_batches(loader.global_batch, loader.order.size, ranks)
        return loader

    def replace_balance(self, balance: BalanceMode) -> BalanceMode:
        """Records the training's balance and returns an even one, which is measured instead.

        Hosts are measured alone and in pairs; the effect of other shares is computed from that.
        """
        self._balance = balance if isinstance(balance, str) else dict(balance)
        return "even"

    def start(self, loader: Loader, epochs: int, steps: int) -> int:
        """Records the training's settings; returns the number of steps to measure instead."""
        assert isinstance(loader, ProbeLoader)
        global_batch, self._sizes = loader.global_batch, loader.sizes
        self._description = {
            "samples": loader.order.size,
            "global_batch": global_batch,
            "steps": steps or epochs * len(loader),
            "balance": self._balance,
        }
        method = self._models.first.communication
        if method:
            communication.validate_forecast(method.requested.name)
            self._description["communication"] = method.requested.name
        is_tuned = method is not None and method.requested.name != "exact"
        self._warmup_steps = loader.warmup_steps = TUNED_WARMUP_STEPS if is_tuned else WARMUP_STEPS
        self._steps_per_round = len(loader.sizes) * (1 + COUNTED_STEPS)
        self._started_at = time.perf_counter()
        return self._warmup_steps + self._steps_per_round * NUM_ROUNDS

    def restart(self, data_s: float) -> None:
        """Leaves out time that was not spent on training; the next step does not count."""
        self._step_start, self._data_s, self._last_samples = time.perf_counter(), data_s, 0

    def stepped(self, samples: int, data_s: float, computing_s: float) -> None:
        """Records a global step.

        Args:
            data_s: Seconds that this rank has waited for data since its start.
            computing_s: Seconds that this rank computed in the step; 0 if unknown.

        Raises:
            QuietExit: All steps are measured.
        """
        member = self._member
        if member.device.type != "cpu":
            torch.get_device_module(member.device).synchronize()
        time_s, step = time.perf_counter(), member.progress.step
        is_settled = step > self._warmup_steps and self._last_samples == samples
        deltas = time_s - self._step_start, data_s - self._data_s
        self._notes.append((samples, *deltas, is_settled, computing_s))
        self._step_start, self._data_s, self._last_samples = time_s, data_s, samples
        if step <= self._warmup_steps or (step - self._warmup_steps) % self._steps_per_round:
            return
        is_overdue = time_s - self._started_at > self._request.seconds
        if member.progress.finished or member.comms.max(torch.tensor([float(is_overdue)]))[0]:
            self._end()
        self._step_start = time.perf_counter()

    def _end(self) -> None:
        member, module = self._member, self._models.module
        rows = member.comms.rows(torch.tensor(self._notes, dtype=torch.float64))
        trained = [p for p in module.parameters() if p.requires_grad]
        report = {
            **self._description,
            "world": member.world.size,
            "hosts": member.comms.texts(member.world.host),
            "device": str(member.device.type),
            "sharded": parallel.is_sharded(module),
            "bytes": sum(p.numel() * p.element_size() for p in trained),
            "buckets": _num_buckets(self._models.first.model),
            "sent": _sent_parts(self._models.first.exchange),
            "steps_done": counted_steps(rows, self._sizes),
            "exchange": self._exchange(trained),
        }
        if member.world.rank == 0:
            files.write_json(member.folder / rundir.MEASURED, report)
        member.progress.steps = member.progress.step
        raise QuietExit

    def _exchange(self, trained: list[nn.Parameter]) -> dict[str, Any] | None:
        """Times all-reduces of one number and of the gradients' bytes, or a part of them."""
        if self._member.comms.is_alone:
            return None
        width = trained[0].element_size()
        num_elements = sum(p.numel() for p in trained)
        scalar = torch.zeros(1, dtype=trained[0].dtype, device=self._member.device)
        delays = [self._timed_reduce(scalar) for _ in range(_NUM_SMALL_REDUCES)]
        delay = statistics.median(delays[2:])
        small = scalar.new_zeros(min(num_elements, _SMALL_REDUCE_BYTES // width))
        self._timed_reduce(small)
        seconds_per_element = max(self._timed_reduce(small) - delay, 1e-6) / len(small)
        size = int(max(len(small), min(num_elements, _LARGE_REDUCE_S / seconds_per_element)))
        large = scalar.new_zeros(size)
        self._timed_reduce(large)
        seconds = statistics.median(self._timed_reduce(large) for _ in range(_NUM_LARGE_REDUCES))
        return {"bytes": size * width, "seconds": seconds, "delay": delay}

    def _timed_reduce(self, tensor: Tensor) -> float:
        """Returns seconds of an all-reduce of the slowest rank; all start together."""
        comms = self._member.comms
        comms.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.device.type != "cpu":
            torch.get_device_module(tensor.device).synchronize()
        return comms.max(torch.tensor([time.perf_counter() - start], dtype=torch.float64))[0]


def counted_steps(rows: Tensor, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the steps that count, in order.

    Args:
        rows: For each rank and step: samples, seconds, seconds of waiting for data, whether it
            counts, seconds of computing; shape ``[ranks, steps, 5]``. If an epoch is as short as a
            step, no step of a batch size may count: then all of them do.
        batches: Global batch sizes that were to be tried.
    """
    notes = rows[0].tolist()
    settled_batches = {int(note[0]) for note in notes if note[3]}
    return [
        {"batch": int(note[0]), "seconds": rows[:, index, 1].tolist(),
         "data": rows[:, index, 2].tolist(), "computing": rows[:, index, 4].tolist()}
        for index, note in enumerate(notes)
        if int(note[0]) in batches and (note[3] or int(note[0]) not in settled_batches)
    ]  # fmt: skip


def _sent_parts(exchange: GradientExchange | None) -> list[float]:
    """Returns the bytes sent relative to exact averages: for two ranks, and for four."""
    if exchange is None or exchange.reducer is None:
        return [1.0, 1.0]
    reducer, count = exchange.reducer, exchange.elements
    exact = REDUCERS["exact"](exchange.context())
    return [
        reducer.bytes_sent(count, num_ranks) / max(exact.bytes_sent(count, num_ranks), 1)
        for num_ranks in (2, 4)
    ]


def _num_buckets(model: nn.Module) -> int:
    if not isinstance(model, DistributedDataParallel):
        return 1
    logging_data: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = str(logging_data.get("rebuilt_bucket_sizes") or logging_data.get("bucket_sizes") or "")
    return max(1, len([size for size in sizes.split(",") if size.strip()]))
