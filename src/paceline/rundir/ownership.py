"""Reads the owner of a run directory: a launcher, or a supervisor on another host."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

from paceline.remote import this_machine
from paceline.rundir import records
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED, SupervisorLocation

FETCHED_AT = "home_since"  # in detached.json: when all results were fetched, in seconds since 1970
LAST_STATUS = "stands"  # in detached.json: the run's status at that time


def read_owner(path: Path) -> dict[str, Any] | None:
    """The owner by the owner file; ``None`` if there is none or it is invalid."""
    record = records.read_object(path / names.OWNER) or {}
    pid = records.as_int(record.get("pid"))
    if pid is None or pid <= 0:
        return None
    owner: dict[str, Any] = {"pid": pid}
    owner |= {name: records.as_text(record.get(name), 255) for name in ("host", "since")}
    if records.as_float(record.get("start")):
        owner["start"] = record["start"]
    if run_id := records.as_text(record.get("run_id"), 64):
        owner["run_id"] = run_id
    return owner


def owner_alive(owner: dict[str, Any]) -> bool:
    """False only if the owner is known to have ended; on another machine that is not known."""
    if not owner_here(owner):
        return True
    start = this_machine.start_time(int(owner["pid"]))
    return start is not None and start == owner.get("start", start)


def owner_here(owner: dict[str, Any]) -> bool:
    """Whether the launcher runs (or ran) on this machine."""
    return owner.get("host") == socket.gethostname()


def is_launcher(path: Path, owner: dict[str, Any]) -> bool:
    """Whether the process that a folder names is the launcher that runs in it.

    The owner file may contain the id of any process. Only the launcher holds the folder's probe
    file open.
    """
    if not owner_here(owner) or "start" not in owner or not owner_alive(owner):
        return False
    return this_machine.has_open(int(owner["pid"]), path / names.PROBE)


def detached_of(path: Path) -> SupervisorLocation | None:
    """Where the run of a folder continues or has ended; ``None`` if all its results are here."""
    record = records.read_object(path / DETACHED) or {}
    return None if records.as_float(record.get(FETCHED_AT)) else SupervisorLocation.read(record)


def ended_since(path: Path, detached: SupervisorLocation) -> bool:
    """Whether the run has a result that is newer than its start."""
    with contextlib.suppress(OSError):
        return (path / names.RESULT).lstat().st_mtime >= detached.since
    return False


def lost(path: Path) -> SupervisorLocation | None:
    """Where the run's supervisor was, if it had died when the results were fetched."""
    record = records.read_object(path / DETACHED) or {}
    return SupervisorLocation.read(record) if record.get(LAST_STATUS) == "lost" else None
