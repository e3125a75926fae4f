"""Leaving a process group without being killed by it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import torch.distributed as dist

_WORKERS = "pt_gloo_runloop"
_LOOKS = 3
_MOST_SECONDS = 2.0


def leave() -> None:
    """Destroys the process group once its threads have nothing left to do.

    A worker thread of gloo lets go of a collective's tensors a moment after the collective has
    returned. When the interpreter ends in this moment, the thread cannot get the interpreter's
    lock and the process aborts with status -6 after a training that went well (seen in one of
    ten short runs on a busy machine).
    """
    if not dist.is_initialized():
        return
    _wait_for_idle_workers()
    dist.destroy_process_group()


def _wait_for_idle_workers() -> None:
    """Sleeping gives the lock away, so a worker that still needs it gets it and is seen running."""
    deadline = time.monotonic() + _MOST_SECONDS
    idle = 0
    while idle < _LOOKS and time.monotonic() < deadline:
        time.sleep(0.002)
        idle = 0 if _running() else idle + 1


def _running() -> bool:
    """True when a worker thread is running or wants to; False where this cannot be seen."""
    return any(_state(task) == "R" for task in Path("/proc/self/task").glob("*"))


def _state(task: Path) -> str:
    with contextlib.suppress(OSError):
        name, _, rest = (task / "stat").read_text().partition(")")
        if _WORKERS in name:
            return rest.split()[0]
    return ""
