"""Control groups for daemons in lab hosts, and their removal: the kernel's are everybody's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def mounting(controllers: Sequence[str]) -> str:
    """Shell text that shows a lab host the kernel's controllers (version 1)."""
    lines = [f"mount -t tmpfs -o mode=755 none {ROOT}"]
    for name in controllers:
        lines += [f"mkdir -p {ROOT}/{name}", f"mount -t cgroup -o {name} none {ROOT}/{name}"]
    return "; ".join(lines)


def remove(pattern: str) -> None:
    """Removes a daemon's empty groups, whichever lab made them; those in use refuse to go."""
    for top in ROOT.glob(f"*/{pattern}"):
        inner = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
        for path in [*inner, top]:
            with contextlib.suppress(OSError):
                path.rmdir()
