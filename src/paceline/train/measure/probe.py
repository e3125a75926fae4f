"""A few measured steps instead of a training: what ``paceline forecast`` asks for.

The script runs as it always does, up to its first steps. They are done at several global batches
in turn, so that it is seen what of a step grows with the batch and what does not; then the ranks
time an all-reduce of as many bytes as the gradients have, rank 0 leaves all of it in the run
directory, and the script ends there. Nothing is saved, resumed or tracked.
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
from paceline.train.data.division import Wish
from paceline.train.data.loader import Loader
from paceline.train.member import Member
from paceline.train.models import Models
from paceline.train.reduce.exchange import GradientExchange
from paceline.train.reduce.registry import REDUCERS
from paceline.train.stop import Quietly

WARM = 4  # steps before anything counts
SETTLING = 24  # the same where ways to communicate are tried, or begin with exact steps
COUNTED = 3  # steps of a batch in a round, after one that does not count: buffers are made anew
ROUNDS = 8
_CALLS = 12  # all-reduces of a single number
_FEW = 1 << 20  # bytes of the first larger one
_WANTED_S = 1.0  # of one of the largest
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """What the environment asks for.

    Attributes:
        batches: Global batches to be tried.
        parts: The same as parts of the training's own.
        seconds: After so long no further round begins.
    """

    batches: tuple[int, ...]
    parts: tuple[float, ...]
    seconds: float

    def of(self, own: int, most: int, ranks: int) -> tuple[int, ...]:
        """The batches for a training with this batch, so many samples and ranks; each once."""
        every = [*self.batches, *(round(part * own) for part in self.parts)] or [own]
        return tuple(dict.fromkeys(min(max(one, ranks, 1), most) for one in every))


def asked(environ: Mapping[str, str]) -> Asked | None:
    """``None`` where the training is to be a training.

    Raises:
        SettingError: The variable says nothing that can be done.
    """
    text = environ.get(jobenv.PROBE, "")
    if not text:
        return None
    try:
        said = json.loads(text)
        batches, parts = tuple(map(int, said["batches"])), tuple(map(float, said["parts"]))
        return Asked(batches, parts, float(said["seconds"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise SettingError(
            f"{jobenv.PROBE} cannot be understood",
            found=text[:200],
            remedy=f"unset {jobenv.PROBE}; paceline forecast sets it for its own runs",
        ) from None


class Tried(Loader):
    """The training's loader, with another global batch now and then.

    Attributes:
        sizes: The batches; each rank has the same.
        warm: Steps of the first of them, before any round.
    """

    sizes: tuple[int, ...] = ()
    warm = WARM

    def size_of(self, step: int) -> int:
        """The global batch of a step, by its number from 0."""
        return self.sizes[max(step - self.warm, 0) // (1 + COUNTED) % len(self.sizes)]

    def _spans(self, offset: int) -> Iterator[tuple[int, int]]:
        step = self._progress.step
        while offset < self.order.size:
            stop = min(offset + self.size_of(step), self.order.size)
            yield offset, stop
            offset, step = stop, step + 1


class Probe:
    """One rank's. Every rank has one and calls it in the same order.

    Args:
        wanted: From the environment.
        member: This rank.
        models: What it trains; there are none yet.
    """

    def __init__(self, wanted: Asked, member: Member, models: Models) -> None:
        self._wanted, self._member, self._models = wanted, member, models
        self._about: dict[str, Any] = {}
        self._sizes: tuple[int, ...] = ()
        self._balance: Wish = "even"
        self._notes: list[tuple[float, float, float, float, float]] = []
        self._began = self._since = time.perf_counter()
        self._waited, self._last, self._round, self._warm = 0.0, 0, 1, WARM

    def loader(self, *args: Any) -> Tried:
        """Of the same arguments as a :class:`Loader`."""
        loader = Tried(*args)
        ranks = self._member.world.size
        loader.sizes = self._wanted.of(loader.global_batch, loader.order.size, ranks)
        return loader

    def shared_by(self, wish: Wish) -> Wish:
        """How batches are shared here, where the training would share them so: evenly.

        Hosts are tried alone and in pairs; what other shares make of it is computed.
        """
        self._balance = wish if isinstance(wish, str) else dict(wish)
        return "even"

    def begin(self, loader: Loader, epochs: int, steps: int) -> int:
        """Takes what was asked for of the training; the steps that there may be instead."""
        assert isinstance(loader, Tried)
        own, self._sizes = loader.global_batch, loader.sizes
        self._about = {
            "samples": loader.order.size,
            "global_batch": own,
            "steps": steps or epochs * len(loader),
            "balance": self._balance,
        }
        only = self._models.first.communication
        if only:
            communication.validate_forecast(only.requested.name)
            self._about["communication"] = only.requested.name
        self._warm = loader.warm = SETTLING if only and only.requested.name != "exact" else WARM
        self._round = len(loader.sizes) * (1 + COUNTED)
        self._began = time.perf_counter()
        return self._warm + self._round * ROUNDS

    def restart(self, waited: float) -> None:
        """Leaves out what was no training; the next step is not settled."""
        self._since, self._waited, self._last = time.perf_counter(), waited, 0

    def stepped(self, samples: int, waited: float, computed: float) -> None:
        """After each global step.

        Args:
            samples: Of it, over all ranks.
            waited: Seconds in which this rank waited for its data, from its beginning.
            computed: Seconds for which this rank computed in it; 0 where it is not known.

        Raises:
            Quietly: All is known.
        """
        device = self._member.device
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        now, step = time.perf_counter(), self._member.progress.step
        settled = step > self._warm and self._last == samples
        since = now - self._since, waited - self._waited
        self._notes.append((samples, *since, settled, computed))
        self._since, self._waited, self._last = now, waited, samples
        if step <= self._warm or (step - self._warm) % self._round:
            return
        late = now - self._began > self._wanted.seconds
        if (
            self._member.progress.finished
            or self._member.comms.most(torch.tensor([float(late)]))[0]
        ):
            self._end()
        self._since = time.perf_counter()

    def _end(self) -> None:
        """Puts all ranks' notes together, and leaves them."""
        member, module = self._member, self._models.module
        rows = member.comms.rows(torch.tensor(self._notes, dtype=torch.float64))
        trained = [p for p in module.parameters() if p.requires_grad]
        said = {
            **self._about,
            "world": member.world.size,
            "hosts": member.comms.texts(member.world.host),
            "device": str(member.device.type),
            "sharded": parallel.is_sharded(module),
            "bytes": sum(p.numel() * p.element_size() for p in trained),
            "buckets": _buckets(self._models.first.model),
            "sent": _sent(self._models.first.exchange),
            "steps_done": steps_of(rows, self._sizes),
            "exchange": self._exchange(trained),
        }
        if member.world.rank == 0:
            files.write_json(member.folder / rundir.MEASURED, said)
        member.progress.steps = member.progress.step
        raise Quietly

    def _exchange(self, trained: list[nn.Parameter]) -> dict[str, Any] | None:
        """Seconds of an all-reduce of one number and of the gradients' bytes, or a part of them."""
        if self._member.comms.alone:
            return None
        width = trained[0].element_size()
        every = sum(p.numel() for p in trained)
        one = torch.zeros(1, dtype=trained[0].dtype, device=self._member.device)
        delay = statistics.median([self._reduced(one) for _ in range(_CALLS)][2:])
        some = torch.zeros(min(every, _FEW // width), dtype=one.dtype, device=one.device)
        self._reduced(some)
        pace = max(self._reduced(some) - delay, 1e-6) / len(some)
        size = int(max(len(some), min(every, _WANTED_S / pace)))
        whole = torch.zeros(size, dtype=one.dtype, device=one.device)
        self._reduced(whole)
        seconds = statistics.median(self._reduced(whole) for _ in range(_REPEATS))
        return {"bytes": size * width, "seconds": seconds, "delay": delay}

    def _reduced(self, tensor: Tensor) -> float:
        """Seconds of an all-reduce that all ranks begin together; those of the slowest rank."""
        comms = self._member.comms
        comms.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor, group=comms.group)
        if tensor.device.type != "cpu":
            torch.get_device_module(tensor.device).synchronize()
        return comms.most(torch.tensor([time.perf_counter() - began], dtype=torch.float64))[0]


def steps_of(rows: Tensor, batches: Sequence[int]) -> list[dict[str, Any]]:
    """The steps that count, in the order in which they were done.

    Args:
        rows: Of all ranks: samples, seconds, seconds of waiting for data, whether it counts, and
            seconds of computing; shape ``[ranks, steps, 5]``. An epoch may be as short as a step:
            then all of a batch count.
        batches: That were to be tried.
    """
    notes = rows[0].tolist()
    settled = {int(note[0]) for note in notes if note[3]}
    return [
        {"batch": int(note[0]), "seconds": rows[:, at, 1].tolist(),
         "data": rows[:, at, 2].tolist(), "computing": rows[:, at, 4].tolist()}
        for at, note in enumerate(notes)
        if int(note[0]) in batches and (note[3] or int(note[0]) not in settled)
    ]  # fmt: skip


def _sent(exchange: GradientExchange | None) -> list[float]:
    """Bytes that a rank sends, as a part of those of exact averages: between two ranks, of more."""
    if exchange is None or exchange.reducer is None:
        return [1.0, 1.0]
    reducer, count = exchange.reducer, exchange.elements
    exact = REDUCERS["exact"](exchange.context())
    return [
        reducer.bytes_sent(count, ranks) / max(exact.bytes_sent(count, ranks), 1)
        for ranks in (2, 4)
    ]


def _buckets(model: nn.Module) -> int:
    """Pieces in which gradients are exchanged."""
    if not isinstance(model, DistributedDataParallel):
        return 1
    said: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = str(said.get("rebuilt_bucket_sizes") or said.get("bucket_sizes") or "")
    return max(1, len([one for one in sizes.split(",") if one.strip()]))
