"""Who runs in a run directory: the mark of a launcher, or what leads to a supervisor elsewhere."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

from paceline.remote import this_machine
from paceline.rundir import records
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED, Detached

HOME = "home_since"  # in detached.json: everything came, in seconds since 1970
STANDS = "stands"  # in it, too: how the run stood then


def read_owner(path: Path) -> dict[str, Any] | None:
    """Who says that the folder is theirs; ``None`` when nobody readable does."""
    said = records.read_object(path / names.OWNER) or {}
    pid = records.whole(said.get("pid"))
    if pid is None or pid <= 0:
        return None
    about = {name: records.words(said.get(name), 255) for name in ("host", "since")}
    known = {"start": said["start"]} if records.number(said.get("start")) else {}
    if run_id := records.words(said.get("run_id"), 64):
        known["run_id"] = run_id
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


def is_launcher(path: Path, owner: dict[str, Any]) -> bool:
    """Whether the process that a folder names is the launcher that runs in it.

    Anybody may have written the number of any process into a folder: only its launcher holds the
    folder's mark open.
    """
    if not owner_here(owner) or "start" not in owner or not owner_alive(owner):
        return False
    return this_machine.has_open(int(owner["pid"]), path / names.PROBE)


def detached_of(path: Path) -> Detached | None:
    """Where the run of a folder goes on, or has ended and not come home; ``None`` where it is here.

    A folder whose results have all come is like that of any other run.
    """
    said = records.read_object(path / DETACHED)
    return None if said is None or records.number(said.get(HOME)) else Detached.read(said)


def ended_since(path: Path, away: Detached) -> bool:
    """Whether the run has a result that is not that of an earlier start in the same folder."""
    with contextlib.suppress(OSError):
        return (path / names.RESULT).lstat().st_mtime >= away.since
    return False


def lost(path: Path) -> Detached | None:
    """Where the run's supervisor was, if it had died without a word when everything came."""
    said = records.read_object(path / DETACHED) or {}
    return Detached.read(said) if said.get(STANDS) == "lost" else None
