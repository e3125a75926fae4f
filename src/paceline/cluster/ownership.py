"""Who runs in a run directory: the mark that a launcher leaves there and takes away at its end."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from paceline.cluster import this_machine
from paceline.spec import rundir as names


def read_owner(path: Path) -> dict[str, Any] | None:
    """Who says that the folder is theirs; ``None`` when nobody readable does."""
    try:
        owner = json.loads((path / names.OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and "pid" in owner else None


def owner_alive(owner: dict[str, Any]) -> bool:
    """False only when the owner is known to be gone; on another machine we cannot know."""
    if not owner_here(owner):
        return True
    start = this_machine.started(int(owner["pid"]))
    return start is not None and start == owner.get("start", start)


def owner_here(owner: dict[str, Any]) -> bool:
    """Whether the launcher runs (or ran) on this machine."""
    return owner.get("host") == socket.gethostname()
