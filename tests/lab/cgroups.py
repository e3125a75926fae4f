"""Mounts and removes control groups for daemons in lab hosts; all hosts share the kernel's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def mounting(controllers: Sequence[str]) -> str:
    """Returns shell commands that mount the kernel's controllers (version 1) on a lab host."""
    lines = [f"mount -t tmpfs -o mode=755 none {ROOT}"]
    for name in controllers:
        lines += [f"mkdir -p {ROOT}/{name}", f"mount -t cgroup -o {name} none {ROOT}/{name}"]
    return "; ".join(lines)


def remove(pattern: str) -> None:
    """Removes a daemon's empty control groups of any lab; those in use cannot be removed."""
    for top in ROOT.glob(f"*/{pattern}"):
        inner = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
        for path in [*inner, top]:
            with contextlib.suppress(OSError):
                path.rmdir()
