"""Reads the owner of a run directory: a launcher, or a supervisor on another host."""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path
from typing import Any

from paceline.remote import this_machine
from paceline.rundir import records
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED, SupervisorLocation
from paceline.spec.formatting import DATE_TIME

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


def read_of_last_start(path: Path, name: str) -> dict[str, Any] | None:
    """Reads ``result.json`` or ``ranks.json`` if the last start in a run directory wrote it.

    The file of an earlier start stays there until the last one writes its own. The last start is
    known by its owner file or, of a detached run, by its supervisor; without these it has ended,
    and has written its files. Launchers of earlier versions write no run id into ``ranks.json``:
    then its time counts.
    """
    record = records.read_object(path / name)
    owner, detached = read_owner(path), detached_of(path)
    if record is None or (owner is None and detached is None):
        return record
    run_id = owner.get("run_id") if owner else detached and detached.run_id
    written_at = records.as_float(record.get("time"))
    is_later = "run_id" not in record and written_at > _start_time(owner, detached)
    return record if is_later or record.get("run_id") == run_id else None


def _start_time(owner: dict[str, Any] | None, detached: SupervisorLocation | None) -> float:
    """When the last start began, in seconds since 1970; infinite if that is not known."""
    if owner is None:
        return (detached and detached.since) or math.inf
    try:
        return time.mktime(time.strptime(owner["since"], DATE_TIME))
    except (OverflowError, ValueError):
        return math.inf


def start_id(path: Path) -> str:
    """The run id of the start whose state a run directory shows; empty if it is not known.

    That is the last one, unless it was refused: then ``result.json`` is that of an earlier one.
    """
    if (owner := read_owner(path)) is not None:
        return str(owner.get("run_id", ""))
    if (detached := detached_of(path)) is not None:
        return detached.run_id
    return records.as_text((records.read_object(path / names.RESULT) or {}).get("run_id"), 64)


def lost(path: Path) -> SupervisorLocation | None:
    """Where the run's supervisor was, if it had died when the results were fetched."""
    record = records.read_object(path / DETACHED) or {}
    return SupervisorLocation.read(record) if record.get(LAST_STATUS) == "lost" else None
