"""Who runs in a run directory: the mark that a launcher leaves there and takes away at its end."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from paceline.remote import this_machine
from paceline.rundir import records
from paceline.spec import rundir as names


def read_owner(path: Path) -> dict[str, Any] | None:
    """Who says that the folder is theirs; ``None`` when nobody readable does."""
    said = records.read_object(path / names.OWNER) or {}
    pid = records.whole(said.get("pid"))
    if pid is None or pid <= 0:
        return None
    about = {name: records.words(said.get(name), 255) for name in ("host", "since")}
    known = {"start": said["start"]} if records.number(said.get("start")) else {}
    return {**about, "pid": pid, **known}


def owner_alive(owner: dict[str, Any]) -> bool:
    """False only when the owner is known to be gone; on another machine we cannot know."""
    if not owner_here(owner):
        return True
    start = this_machine.started(int(owner["pid"]))
    return start is not None and start == owner.get("start", start)


def owner_here(owner: dict[str, Any]) -> bool:
    """Whether the launcher runs (or ran) on this machine."""
    return owner.get("host") == socket.gethostname()
