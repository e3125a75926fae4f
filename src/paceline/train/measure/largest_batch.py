"""The largest batch that a process can compute at once, found by trying.

An accelerator says itself when its memory is full. A CPU's process would be killed, so each gets a
limit: four fifths of what is free on its host, or in its control group, shared by its ranks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import re
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
from paceline.train.comms import parse_texts
from paceline.train.data.balance import shares_by_host
from paceline.train.data.loader import Loader
from paceline.train.data.order import with_script_order
from paceline.train.measure.lr_range import Compute
from paceline.train.measure.trial import restored_afterwards, trial_batches
from paceline.train.update import Updater, loss_of, per_sample_losses

if TYPE_CHECKING:
    from paceline.train.session import Session

TABLE = "batch-trials.csv"
_MEMORY_PART = 0.8  # of the free memory
_PRECISION_PARTS = 16  # parts of the largest batch that may be missing
# host, samples that fit, of how many, in what
_FIT_SCHEMA = tuple_of(text(), integer(), integer(), text())
_OUT_OF_MEMORY = re.compile("out of memory|alloc|could not create a (memory|primitive)", re.I)


@dataclass(frozen=True)
class LargestBatch:
    """Result of the trials.

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
        lengths: Of each sample: the longest are tried.

    Raises:
        SettingError: The model is sharded over several ranks.
    """
    _check_unsharded(
        session,
        "the largest batch of a sharded model cannot be tried",
        "try it without --shard, or with one process",
    )
    seconds: dict[int, float] = {}
    with _trials(session, loader, compute, lengths) as (trials, limit):

        def fits(size: int) -> bool:
            duration_s = session.comms.max(torch.tensor([trials.run(size)], dtype=torch.float64))[0]
            if duration_s < float("inf"):
                seconds[size] = duration_s
            return duration_s < float("inf")

        largest, failing = search(fits, loader.order.size // session.world.size)
    result = LargestBatch(largest, failing, limit, dict(sorted(seconds.items())))
    if session.world.rank == 0:
        rows = [f"{size},{s:.4f},{size / s:.1f}" for size, s in result.seconds.items()]
        lines = ["samples_of_a_process,seconds,samples_per_s", *rows]
        files.write_bytes(session.folder / TABLE, ("\n".join(lines) + "\n").encode())
    return result


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
    _check_unsharded(
        session,
        "what fits on each rank cannot be tried with a sharded model",
        "--micro-batch N, or leave --shard out",
    )
    share = _initial_share(session, loader)
    upper_bound = min(loader.limit or share, share)
    with _trials(session, loader, compute, lengths) as (trials, memory):

        def fits(size: int) -> bool:
            return trials.run(size) < float("inf")

        largest = upper_bound if fits(upper_bound) else search(fits, upper_bound - 1)[0]
    if largest < share:
        loader.limit = largest
    loader.has_common_limit = session.comms.is_alone
    world = session.world
    reports = session.comms.texts(json.dumps([world.host, largest, share, memory]))
    ranks = [(number, *report) for number, report in enumerate(parse_texts(reports, _FIT_SCHEMA))]
    if failed_rank := next((rank for rank in ranks if not rank[2]), None):
        raise SettingError(
            f"not even one sample can be computed by rank {failed_rank[0]} on {failed_rank[1]}",
            found=failed_rank[4],
            remedy="a smaller model or shorter samples, or leave this host out of the job",
        )
    memory_fits, hosts = list[tuple[str, int]](), dict[str, list[str]]()
    for _, host, num_fitting, share_size, _ in ranks:
        memory_fits.append((host, num_fitting if num_fitting < share_size else 0))
        part = f"{num_fitting} of {share_size}" if num_fitting < share_size else f"all {share_size}"
        hosts.setdefault(host, []).append(part)
    loader.memory_fits = memory_fits
    host_texts = [f"{host} {', '.join(dict.fromkeys(parts))}" for host, parts in hosts.items()]
    omitted = f" and {len(host_texts) - 12} more hosts" if len(host_texts) > 12 else ""
    return f"samples of a share that fit at once: {'; '.join(host_texts[:12])}{omitted}"


def _initial_share(session: Session, loader: Loader) -> int:
    """Returns this rank's first share of a step; a collective for weights of hosts."""
    world = session.world
    if isinstance(loader.balance, str):
        return -(-loader.global_batch // world.size)
    hosts = session.comms.texts(world.host)
    return shares_by_host(loader.balance, hosts, loader.global_batch)[world.rank]


def search(is_fitting: Callable[[int], bool], upper_bound: int) -> tuple[int, int]:
    """Returns the largest size that fits, nearly, by doubling and halving.

    Returns:
        What fits (0: nothing does), and the smallest size that was tried and does not (0: none).
    """
    largest_fitting, smallest_failing, size = 0, 0, 2  # batch norm has nothing to compute of one
    while not smallest_failing and largest_fitting < upper_bound:
        size = min(size, upper_bound)
        if is_fitting(size):
            largest_fitting, size = size, 2 * size
        else:
            smallest_failing = size
    while smallest_failing - largest_fitting > 1 + largest_fitting // _PRECISION_PARTS:
        size = (largest_fitting + smallest_failing) // 2
        if is_fitting(size):
            largest_fitting = size
        else:
            smallest_failing = size
    return largest_fitting, smallest_failing


def _check_unsharded(session: Session, problem: str, remedy: str) -> None:
    if parallel.is_sharded(session.models.module) and not session.comms.is_alone:
        raise SettingError(
            problem,
            found="a rank whose memory is full would leave the others waiting",
            remedy=remedy,
        )


@contextmanager
def _trials(
    session: Session, loader: Loader, compute: Compute, lengths: Sequence[int] | None
) -> Iterator[tuple[_Trials, str]]:
    """Context of trials, the longest samples first; also yields a description of the limit."""
    longest = None if lengths is None else np.argsort(-np.asarray(lengths), kind="stable")
    with restored_afterwards(session.models, session.device, session.precision) as updater:
        trials = _Trials(session, updater, loader, compute, longest)
        with _memory_limit(session) as limit, _without_buffer_sync(updater.model):
            yield trials, limit


@dataclass(frozen=True)
class _Trials:
    """Tries a number of samples on this rank."""

    session: Session
    updater: Updater
    loader: Loader
    compute: Compute
    sample_order: np.typing.NDArray[np.int64] | None

    def run(self, size: int) -> float:
        """Returns the seconds of a step; infinity if memory is full."""
        try:
            return self._steps(size)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if not is_out_of_memory(error):
                raise
            return float("inf")
        finally:
            self.updater.optimizer.zero_grad()
            gc.collect()
            if self.session.device.type != "cpu":
                torch.get_device_module(self.session.device).empty_cache()

    def _steps(self, size: int) -> float:
        session, duration_s = self.session, 0.0
        order, ids = self.loader.order, self.sample_order
        if ids is not None:
            order = with_script_order(order, lambda epoch: ids)
        loader = self.loader.rehearsal(1, order=order, global_batch=size * session.world.size)
        for _ in range(2):  # the first makes the optimizer's moments
            session.phase("find the largest batch")
            start_s = time.perf_counter()
            with contextlib.closing(trial_batches(loader, 1)) as batches, session.models.unsynced():
                for batch in batches:
                    losses = per_sample_losses(self.compute(batch), len(batch.ids))
                    self.updater.backward(loss_of(losses, batch, session.world.size))
                    self.updater.update()
            if session.device.type != "cpu":
                torch.get_device_module(session.device).synchronize()
            duration_s = time.perf_counter() - start_s
        return duration_s


def is_out_of_memory(error: BaseException) -> bool:
    is_memory_error = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_memory_error or _OUT_OF_MEMORY.search(str(error)) is not None


@contextmanager
def _without_buffer_sync(model: torch.nn.Module) -> Iterator[None]:
    """Context in which DDP sends no buffers: a rank without memory would not take part."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    former, model.broadcast_buffers = model.broadcast_buffers, False
    try:
        yield
    finally:
        model.broadcast_buffers = former


@contextmanager
def _memory_limit(session: Session) -> Iterator[str]:
    """Limits a CPU process to part of the free memory; yields a description of the limit."""
    if session.device.type != "cpu":
        yield f"the memory of {torch.get_device_module(session.device).get_device_name()}"
        return
    import resource

    kind = resource.RLIMIT_DATA
    gc.collect()  # what goes while batches are tried would make room above the limit
    used = psutil.Process().memory_info().data
    share_bytes = _free_bytes() * _MEMORY_PART / session.world.local_size
    former = resource.getrlimit(kind)
    limit = used + int(share_bytes)
    hard = former[1] if former[1] != resource.RLIM_INFINITY else limit
    resource.setrlimit(kind, (min(limit, hard), former[1]))
    try:
        size = f"{share_bytes / 2**30:.1f} GiB"
        yield f"{size}: {_MEMORY_PART:.0%} of what is free here, for each process"
    finally:
        resource.setrlimit(kind, former)


def device_memory(device: torch.device, local_size: int) -> tuple[float, float]:
    """Returns all bytes and free bytes of a process: of its accelerator, or its part of the host.

    Args:
        local_size: Processes of this host.
    """
    if device.type != "cpu":
        free, total = torch.get_device_module(device).mem_get_info(device)
        return float(total), float(free)
    total = min([float(files.memory_bytes()), *_group_limits()])
    return total / local_size, _free_bytes() / local_size


def _free_bytes() -> float:
    """Returns free memory of this host, or of the control group if that has less."""
    local_bytes = psutil.Process().memory_info().rss
    limits: list[float] = [max(0.0, limit - local_bytes) for limit in _group_limits()]
    limits.append(float(psutil.virtual_memory().available))
    return min(limits)


def _group_limits() -> list[float]:
    """Returns bytes that this process's control group (version 2) and those above it may have."""
    limits = [math.inf]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            folder = Path("/sys/fs/cgroup") / line[3:].lstrip("/")
            for group in (folder, *folder.parents) if line.startswith("0::") else ():
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    limits.append(float((group / "memory.max").read_text(encoding="utf-8")))
    return limits
