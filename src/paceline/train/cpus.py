"""How many CPUs this process may really use."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MOST_WORKERS = 8


def allowed(quota_file: Path = _QUOTA) -> int:
    """CPUs by affinity and by the container's quota, at least 1."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        count = os.cpu_count() or 1
    return max(1, min(count, _quota(quota_file, count)))


def _quota(file: Path, otherwise: int) -> int:
    try:
        quota, period = file.read_text().split()
        return int(quota) // int(period)
    except (OSError, ValueError):  # no control groups, or "max"
        return otherwise


def loader_workers(cpus: int, local_ranks: int) -> int:
    """Loader processes for each rank: what the ranks of the node leave free.

    Args:
        cpus: CPUs that this process may use. Where launchers bind ranks these are its own.
        local_ranks: Ranks that share them.
    """
    return max(0, min(MOST_WORKERS, cpus // local_ranks - 1))
