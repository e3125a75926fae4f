"""Keeps data workers alive while the process that started them reacts to a signal.

A scheduler, and many a user, signals every process of a job at once. A rank that saves before it
ends may need further batches until then, so its workers leave such signals to it.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import signal
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def protect_data_workers() -> None:
    """Protects the workers that any DataLoader of this process starts from now on."""
    start_iterator = DataLoader._get_iterator
    if getattr(start_iterator, "protects_workers", False):
        return

    @functools.wraps(start_iterator)
    def start_protected(loader: DataLoader[Any]) -> Any:
        if loader.num_workers == 0:
            return start_iterator(loader)
        user_init = loader.worker_init_fn
        context: Any = loader.multiprocessing_context or multiprocessing
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # or it would be now, and unblock signals
        # Inherited by fork and by exec: so nothing ends a worker before its handlers are set.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        loader.worker_init_fn = _WorkerInit(user_init, mask)
        try:
            iterator: Any = start_iterator(loader)
        finally:
            loader.worker_init_fn = user_init
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _end_by_kill(iterator._workers, id(iterator))
        return iterator

    patched: Any = start_protected
    patched.protects_workers = True
    DataLoader._get_iterator = patched  # type: ignore[method-assign]


@dataclass(frozen=True)
class _WorkerInit:
    """Runs in a new worker: sets its signal handlers, then calls the script's own function."""

    user_init: Callable[[int], None] | None
    mask: Iterable[int]

    def __call__(self, worker: int) -> None:
        for number in _SIGNALS:
            signal.signal(number, _ignore_signal)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        if self.user_init is not None:
            self.user_init(worker)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Does nothing. Programs that a worker starts have no handler, unlike with SIG_IGN."""


def _end_by_kill(workers: Iterable[BaseProcess], iterator_id: int) -> None:
    """Makes ``terminate`` end these workers of an iterator although they ignore SIGTERM."""
    for worker in workers:
        process: Any = worker._popen  # type: ignore[attr-defined]
        process.terminate = functools.partial(_kill, weakref.ref(process), iterator_id)


def _kill(reference: weakref.ref[Any], iterator_id: int) -> None:
    with contextlib.suppress(ValueError):  # torch has forgotten them already
        torch._C._remove_worker_pids(iterator_id)  # or it would report their end as a failure
    if (process := reference()) is not None:
        process.kill()
