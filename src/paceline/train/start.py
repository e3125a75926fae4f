"""Starts a session: :func:`join` forms the process group and connects to the launcher."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from paceline.spec import jobenv, launchers, rundir
from paceline.spec.errors import SettingError
from paceline.train import compiler, report, world
from paceline.train import device as devices
from paceline.train.elastic import newcomer
from paceline.train.elastic.connections import GlooConnections
from paceline.train.elastic.control import Control
from paceline.train.elastic.device_group import make_device_group
from paceline.train.elastic.job_group import GroupFactory, JobGroup
from paceline.train.elastic.newcomer import Recording
from paceline.train.elastic.recovery import Recovery
from paceline.train.session import Session

_MAX_DESCRIPTORS = 65_536
# lets gloo read all ranks' addresses in two requests to the store, not in three for each rank
_BATCHED_STORE = "GLOO_ENABLE_STORE_V2_API", "1"


def join(
    name: str = "train",
    *,
    seed: int = 0,
    device: str = "auto",
    backend: str = "auto",
    dtype: str = "float32",
    run_dir: str | Path | None = None,
    log_every: int = 0,
    check_every: int = 100,
    timeout: timedelta | None = None,
    deterministic: bool = False,
    quiet: bool = False,
) -> Session:
    """Joins the job as one of its processes, and waits for the others.

    Works under the launcher, torchrun, an MPI or a scheduler, and alone. The variables of another
    launcher are translated into torchrun's in this process's environment. A process group that the
    script has made is used, and not destroyed.

    Args:
        name: Part of the default run directory ``runs/NAME-DATE-TIME``.
        seed: Seed of everything random: initial weights, order of the data, augmentation.
        device: ``auto``, ``cpu``, ``cuda`` or ``xpu``.
        backend: ``auto``, ``gloo``, ``nccl``, ``xccl`` or ``mpi``. If only some ranks have an
            accelerator, ``auto`` is ``gloo``.
        dtype: ``float32``, ``float64``, ``bf16`` or ``fp16`` (the last two by autocast).
        run_dir: Folder to which rank 0 writes; the launcher's choice takes precedence.
        log_every: Global steps between two records; 0 chooses by the length of an epoch.
        check_every: Global steps between two checks that all ranks hold the same model.
        timeout: Longest wait in a collective; ``None`` is torch's default.
        deterministic: On accelerators, uses only kernels that always give the same bits. That is
            slower, and an operation without such a kernel fails. CPUs are always deterministic.
        quiet: Writes no metrics and events; for evaluation and prediction.

    Raises:
        SettingError: A value is unknown, or this machine does not support it, or the launcher was
            given ``--communication``.
        JobError: The processes that came together are not those that were planned.
    """
    if method := os.environ.get(jobenv.COMMUNICATION):
        raise SettingError(
            f"--communication {method} is for scripts that use DistributedDataParallel",
            found="this script uses paceline.train",
            remedy=f'leave it out; session.prepare(…, communication="{method}") does the same',
        )
    compiler.defer_dynamo()
    os.environ.update(launchers.torchrun_variables(os.environ, os.getppid()))
    newcomer_start = newcomer.read_newcomer(os.environ)
    place = world.read(os.environ) if newcomer_start is None else newcomer_start.place
    available = devices.available_devices()
    target = devices.choose_device(device, available, place.local_rank)
    backend_name = devices.choose_backend(backend, target, available)
    precision = devices.precision(dtype)
    devices.configure_device(target, deterministic)
    report.to_launcher(os.environ, place.rank).event("joining")
    owns_group, mixed = place.joined and not dist.is_initialized(), False
    if owns_group:
        os.environ.setdefault(*_BATCHED_STORE)
        options: dict[str, Any] = {}
        connections = GlooConnections()
        if newcomer_start is not None:
            options = {"store": HashStore(), "rank": 0, "world_size": 1}
            mixed = newcomer_start.mixed
        elif backend in ("auto", "gloo", "nccl"):
            # so that a rank that waits in the store for a lost one can be freed
            with connections.tracked(place.size):
                options, mixed = _rendezvous(target.type, place.size, timeout)
                connections.note_store()
        if mixed:
            backend_name = devices.choose_backend("gloo", target, available)
        device_group = None
        if os.environ.get(jobenv.CONTROL_FD) and place.size > 1 and not mixed:
            device_group = make_device_group(backend_name, target, os.environ)
        is_bound = target.type != "cpu" and not mixed and device_group is None
        groups = GroupFactory(backend_name, target if is_bound else None, device_group)
        # only gloo's connections are shut down when a rank is lost
        is_tracked = backend_name == "gloo" or device_group is not None
        links = connections if is_tracked else GlooConnections()
        links.device = device_group
        watched = links.tracked(place.size) if is_tracked else nullcontext()
        with watched, newcomer.group_of_one() if newcomer_start else nullcontext():
            messages = groups.make(timeout, **options)
    if newcomer_start is None:
        world.check_planned(place, os.environ)
    devices.seed_all(seed)
    os.umask(os.umask(0o077) | 0o002)  # others write no checkpoint, whatever the login's umask
    folder = _run_folder(name, run_dir)
    reporter = report.reporter(os.environ, place.rank, folder, quiet=quiet)
    intervals = log_every, check_every
    session = Session(place, target, precision, folder, seed, *intervals, reporter, mixed=mixed)
    session.leaves_group = owns_group
    descriptor = os.environ.get(jobenv.CONTROL_FD, "")
    if descriptor.isdecimal():
        control = Control(int(descriptor), links if owns_group else GlooConnections())
        session.attach_control(control)
        if owns_group:
            slot, store = place.rank, _job_store()
            if newcomer_start is not None:
                slot, store = newcomer_start.slot, newcomer_start.store
            _raise_descriptor_limit()
            group = JobGroup(control, links, groups.make_at, store, timeout, messages)
            recovery = Recovery(slot, session.comms, control, group)
            recording = Recording(recovery, {"ranks": place.size, "mixed": mixed})
            start = recording if newcomer_start is None else newcomer_start.start
            session.attach_recovery(recovery, start)
    session.event("joined", world=place.size, device=str(target), backend=backend_name)
    return session


def _raise_descriptor_limit() -> None:
    """Raises the limit of open descriptors: groups that were left in a collective keep theirs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _rendezvous(kind: str, size: int, timeout: timedelta | None) -> tuple[dict[str, Any], bool]:
    """Connects to the ranks' store; returns options for the process group, and whether the ranks
    compute on different kinds of devices."""
    wait_limit = timeout or default_pg_timeout
    store, rank, ranks = next(iter(rendezvous("env://", timeout=wait_limit)))
    store.set_timeout(wait_limit)
    group_store = PrefixStore("default_pg", store)
    notes = PrefixStore("paceline/devices", store)
    notes.add(kind, 1)
    if notes.add("all", 1) == size:
        notes.set("met", "1")
    notes.wait(["met"], wait_limit)
    options = {"store": group_store, "rank": rank, "world_size": ranks}
    return options, notes.add(kind, 0) < size


def _job_store() -> Any:
    """Returns the store of the default group without its prefixes."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _run_folder(name: str, requested: str | Path | None) -> Path:
    chosen = os.environ.get(jobenv.RUN_DIR) or requested
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path(chosen) if chosen else Path(rundir.DEFAULT_PARENT) / f"{name}-{stamp}"
