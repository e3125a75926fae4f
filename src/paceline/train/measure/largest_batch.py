"""The largest batch that a process can compute at once, found by trying.

An accelerator says itself when its memory is full. A CPU's process would be killed, so each gets a
limit: four fifths of what is free on its host, or in its control group, shared by its ranks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.spec.errors import SettingError
from paceline.spec.schema import integer, text, tuple_of
from paceline.train import files, parallel
from paceline.train.comms import checked
from paceline.train.data.balance import by_host
from paceline.train.data.loader import Loader
from paceline.train.data.order import stated
from paceline.train.measure.lr_range import Compute
from paceline.train.measure.trial import steps_of, untouched
from paceline.train.update import Updater, each_loss, loss_of

if TYPE_CHECKING:
    from paceline.train.session import Session

TABLE = "batch-trials.csv"
_PART = 0.8  # of the free memory
_NEAR = 16  # parts of the largest batch that may be missing
_FITS = tuple_of(
    text(), integer(), integer(), text()
)  # host, samples that fit, of how many, in what
_FULL = ("out of memory", "alloc", "could not create a memory", "could not create a primitive")


@dataclass(frozen=True)
class LargestBatch:
    """What the trials have found.

    Attributes:
        fits: Most samples that were computed at once; 0: not even one could be.
        fails: Fewest that could not be; 0: all of the data can.
        limit: Of the memory, for people.
        seconds: Of a step by samples of a process, as the slowest rank saw it.
    """

    fits: int
    fails: int
    limit: str
    seconds: dict[int, float]

    def __str__(self) -> str:
        if not self.fits:
            return f"not even one sample can be computed ({self.limit})"
        if not self.fails:
            return (
                f"largest batch of a process: {self.fits}, all the data that it has"
                f" ({self.limit}): --micro-batch is not needed"
            )
        return (
            f"largest batch of a process: {self.fits} samples; {self.fails} do not fit"
            f" ({self.limit})\nsuggested: --micro-batch {self.fits} with any --global-batch, or"
            f" --batch-per-process {self.fits}"
        )


def find_batch(
    session: Session, loader: Loader, compute: Compute, *, lengths: Sequence[int] | None = None
) -> LargestBatch:
    """Tries batches of 2, 4, 8, … samples on every rank, then between the last two.

    A trial is two steps: forward and backward pass and an update, without the exchange of
    gradients, so that no rank waits for one that has failed. Everything is put back. To be called
    after ``session.prepare`` and before ``session.epochs``; the table is in the run directory.

    Args:
        session: With a single model.
        loader: Of the training.
        compute: The forward pass.
        lengths: Of each sample: the longest are tried.

    Raises:
        SettingError: The model is sharded over several ranks.
    """
    if parallel.is_sharded(session.models.module) and not session.comms.alone:
        raise SettingError(
            "the largest batch of a sharded model cannot be tried",
            found="a rank whose memory is full would leave the others waiting",
            remedy="try it without --shard, or with one process",
        )
    seconds: dict[int, float] = {}
    with untouched(session.models, session.device, session.precision) as updater:
        trials = _Trials(session, updater, loader, compute, _longest(lengths))

        def fits(size: int) -> bool:
            took = session.comms.most(torch.tensor([trials.run(size)], dtype=torch.float64))[0]
            if took < float("inf"):
                seconds[size] = took
            return took < float("inf")

        with _limited(session) as limit, _silent(updater.model):
            best, failed = search(fits, loader.order.size // session.world.size)
    found = LargestBatch(best, failed, limit, dict(sorted(seconds.items())))
    if session.world.rank == 0:
        rows = [f"{size},{took:.4f},{size / took:.1f}" for size, took in found.seconds.items()]
        lines = ["samples_of_a_process,seconds,samples_per_s", *rows]
        files.write_bytes(session.folder / TABLE, ("\n".join(lines) + "\n").encode())
    return found


def fit_batch(
    session: Session, loader: Loader, compute: Compute, *, lengths: Sequence[int] | None = None
) -> str:
    """Has each rank compute at once what fits into its memory, and the rest in further pieces.

    Where a rank's whole share fits, that is all it tries; otherwise it looks for the largest part,
    as :func:`find_batch` does. So a small GPU beside a large one gets what fits, and the gradient
    stays what it was. To be called after ``session.prepare`` and before ``session.checkpoints``.

    Args:
        session: With a single model.
        loader: Of the training; what was its ``limit`` is an upper bound.
        compute: The forward pass.
        lengths: Of each sample: the longest are tried.

    Returns:
        What to say: how many samples fit on each host.

    Raises:
        SettingError: The model is sharded over several ranks; on some rank not even one sample
            fits.
    """
    if parallel.is_sharded(session.models.module) and not session.comms.alone:
        raise SettingError(
            "what fits on each rank cannot be tried with a sharded model",
            found="a rank whose memory is full would leave the others waiting",
            remedy="--micro-batch N, or leave --shard out",
        )
    share = _first_share(session, loader)
    most = min(loader.limit or share, share)
    with untouched(session.models, session.device, session.precision) as updater:
        trials = _Trials(session, updater, loader, compute, _longest(lengths))

        def fits(size: int) -> bool:
            return trials.run(size) < float("inf")

        with _limited(session) as memory, _silent(updater.model):
            found = most if fits(most) else search(fits, most - 1)[0]
    if found < share:
        loader.limit = found
    loader.same_limit = session.comms.alone
    world = session.world
    said = session.comms.texts(json.dumps([world.host, found, share, memory]))
    ranks = [(number, *one) for number, one in enumerate(checked(said, _FITS))]
    if none := next((one for one in ranks if not one[2]), None):
        raise SettingError(
            f"not even one sample can be computed by rank {none[0]} on {none[1]}",
            found=none[4],
            remedy="a smaller model or shorter samples, or leave this host out of the job",
        )
    loader.fits = [(host, fit if fit < wanted else 0) for _, host, fit, wanted, _ in ranks]
    hosts: dict[str, list[str]] = {}
    for _, host, fit, wanted, _ in ranks:
        part = f"{fit} of {wanted}" if fit < wanted else f"all {wanted}"
        hosts.setdefault(host, []).append(part)
    some = [f"{host} {', '.join(dict.fromkeys(parts))}" for host, parts in hosts.items()]
    more = f" and {len(some) - 12} more hosts" if len(some) > 12 else ""
    return f"samples of a share that fit at once: {'; '.join(some[:12])}{more}"


def _first_share(session: Session, loader: Loader) -> int:
    """Samples of a step that this rank begins with; a collective for weights of hosts."""
    world = session.world
    if isinstance(loader.balance, str):
        return -(-loader.global_batch // world.size)
    hosts = session.comms.texts(world.host)
    return by_host(loader.balance, hosts, loader.global_batch)[world.rank]


def search(fits: Callable[[int], bool], most: int) -> tuple[int, int]:
    """The largest size that fits, nearly, by doubling and halving.

    Args:
        fits: Tries a size.
        most: No size above is tried.

    Returns:
        What fits (0: nothing does), and the smallest size that was tried and does not (0: none).
    """
    good, bad, size = 0, 0, 2  # batch norm has nothing to compute of one
    while not bad and good < most:
        size = min(size, most)
        if fits(size):
            good, size = size, 2 * size
        else:
            bad = size
    while bad - good > 1 + good // _NEAR:
        size = (good + bad) // 2
        if fits(size):
            good = size
        else:
            bad = size
    return good, bad


def _longest(lengths: Sequence[int] | None) -> np.typing.NDArray[np.int64] | None:
    """The samples, the longest first; ``None`` where they are all alike."""
    return None if lengths is None else np.argsort(-np.asarray(lengths), kind="stable")


class _Trials:
    """Tries a number of samples on this rank."""

    def __init__(
        self,
        session: Session,
        updater: Updater,
        loader: Loader,
        compute: Compute,
        longest: np.typing.NDArray[np.int64] | None,
    ) -> None:
        self._session, self._updater, self._compute = session, updater, compute
        self._loader, self._longest = loader, longest

    def run(self, size: int) -> float:
        """Seconds of a step; infinity where the memory is full."""
        try:
            return self._steps(size)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_full(error):
                raise
            return float("inf")
        finally:
            self._updater.optimizer.zero_grad()
            gc.collect()
            if self._session.device.type != "cpu":
                torch.get_device_module(self._session.device).empty_cache()

    def _steps(self, size: int) -> float:
        session, took = self._session, 0.0
        order = self._loader.order
        if self._longest is not None:
            ids = self._longest
            order = stated(order, lambda epoch: ids)
        own = self._loader.rehearsal(1, order=order, global_batch=size * session.world.size)
        for _ in range(2):  # the first makes the optimizer's moments
            session.phase("find the largest batch")
            began = time.perf_counter()
            with contextlib.closing(steps_of(own, 1)) as batches, session.models.unsynced():
                for batch in batches:
                    each = each_loss(self._compute(batch), len(batch.ids))
                    self._updater.backward(loss_of(each, batch, session.world.size))
                    self._updater.update()
            if session.device.type != "cpu":
                torch.get_device_module(session.device).synchronize()
            took = time.perf_counter() - began
        return took


def is_full(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(sign in str(error).lower() for sign in _FULL)


@contextmanager
def _silent(model: torch.nn.Module) -> Iterator[None]:
    """DDP sends buffers before a forward pass; a rank whose memory is full would not come."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before, model.broadcast_buffers = model.broadcast_buffers, False
    try:
        yield
    finally:
        model.broadcast_buffers = before


@contextmanager
def _limited(session: Session) -> Iterator[str]:
    """Gives a process on a CPU a limit within its host's free memory; says what the limit is."""
    if session.device.type != "cpu":
        yield f"the memory of {torch.get_device_module(session.device).get_device_name()}"
        return
    import resource

    kind = resource.RLIMIT_DATA
    gc.collect()  # what goes while batches are tried would make room above the limit
    used, share = _data_bytes(), _free_bytes() * _PART / session.world.local_size
    former = resource.getrlimit(kind)
    top = used + int(share)
    hard = former[1] if former[1] != resource.RLIM_INFINITY else top
    resource.setrlimit(kind, (min(top, hard), former[1]))
    try:
        yield f"{share / 2**30:.1f} GiB: {_PART:.0%} of what is free here, for each process"
    finally:
        resource.setrlimit(kind, former)


def _free_bytes() -> float:
    """Of this host, and of the control group if that has less."""
    free = [float(psutil.virtual_memory().available)]
    mine = psutil.Process().memory_info().rss
    for folder in _groups():
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            top = int((folder / "memory.max").read_text(encoding="utf-8"))
            free.append(max(0.0, top - mine))
    return min(free)


def _groups() -> Iterator[Path]:
    """This process's control group (version 2) and those above it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                folder = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
                yield from (folder, *folder.parents)


def _data_bytes() -> int:
    """What counts for the limit already."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)
