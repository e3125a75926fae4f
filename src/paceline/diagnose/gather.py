"""Reads evidence: a run directory, or any log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.cluster.ownership import owner_alive, owner_here, read_owner
from paceline.diagnose import logs as cutting
from paceline.diagnose.evidence import ERASED, End, Evidence, First, Launcher, Log
from paceline.spec import rundir as names
from paceline.spec.errors import DataError

HEAD = 64 << 10  # bytes read of a log's beginning
TAIL = 256 << 10  # and of its end, where causes stand
_SIGNS = (names.EVENTS, names.RESULT, names.PLAN, names.OWNER)


def from_run(path: Path) -> Evidence:
    """The evidence of a run directory. DataError when it is none."""
    if not any((path / name).exists() for name in _SIGNS):
        raise DataError(
            f"{path} is not a run directory",
            found="no events.jsonl, result.json or plan.json in it",
            remedy="Give the folder that the run printed (runs/NAME-DATE-TIME), or --log FILE",
        )
    launcher, events = _launcher(path), _lines(path / names.EVENTS)
    # a run that has not ended leaves the result of the one before it in the folder
    result = _json(path / names.RESULT) if launcher is None else {}
    first = _first(result.get("first_failure"))
    ends = _ends(events)
    found = _rank_logs(path / names.LOGS, _hosts_of(events))
    return Evidence(
        logs=tuple(_ordered(found, first, ends)),
        ends=ends,
        first=first,
        error=str(result.get("error") or ""),
        events=tuple(events),
        metrics=tuple(_lines(path / names.METRICS)),
        hosts=_json(path / names.HOSTS),
        interrupted=result.get("interrupted"),
        exit_code=result.get("exit_code"),
        launcher=launcher,
    )


def _launcher(path: Path) -> Launcher | None:
    owner = read_owner(path)
    if owner is None:
        return None
    alive = owner_alive(owner) if owner_here(owner) else None
    about = str(owner.get("host", "")), int(owner["pid"]), str(owner.get("since", ""))
    return Launcher(*about, alive)


def from_log(text: str) -> Evidence:
    """The evidence of one log, of whatever launcher."""
    first = cutting.root_cause(text)
    found = cutting.split(text)
    if first is not None and first.kind == "signal" and first.rank is not None:
        code = int(first.headline.rsplit(" ", 1)[1])
        end = End(first.host, first.rank, None, -code)
        return Evidence(tuple(_ordered(found, first, (end,))), (end,), first)
    return Evidence(tuple(_ordered(found, first, ())), (), first)


def _ordered(found: Iterable[Log], first: First | None, ends: tuple[End, ...]) -> list[Log]:
    """The first failing rank's log first; then ranks in the order of their bad ends."""
    bad = [(end.host, end.rank) for end in ends if end.code != 0]

    def order(log: Log) -> tuple[bool, int, bool, int]:
        is_first = first is not None and log.rank == first.rank and log.host in (first.host, "")
        key = (log.host, log.rank)
        place = bad.index(key) if key in bad else len(bad)
        return (not is_first, place, log.rank is None, log.rank or 0)

    return sorted(found, key=order)


def _first(said: Any) -> First | None:
    if not isinstance(said, dict):
        return None
    return First(
        str(said.get("kind", "")),
        str(said.get("host") or ""),
        said.get("rank"),
        str(said.get("headline") or ""),
        str(said.get("traceback") or ""),
    )


def _ends(events: list[dict[str, Any]]) -> tuple[End, ...]:
    return tuple(
        End(
            str(event.get("host", "")),
            int(event.get("rank", 0)),
            event.get("code"),
            event.get("signal"),
            float(event.get("time", 0)),
            int(event.get("peak_bytes") or 0),
            event.get("memory") or {},
            event.get("seen") or {},
        )
        for event in events
        if event.get("event") == "rank ended"
    )


def _hosts_of(events: list[dict[str, Any]]) -> dict[str, str]:
    """Host by the name of its folder among the logs."""
    hosts = {str(event["host"]) for event in events if event.get("host")}
    return {"".join(c if c.isalnum() or c in "._-" else "_" for c in h).lstrip("."): h
            for h in hosts}  # fmt: skip


def _rank_logs(folder: Path, hosts: Mapping[str, str]) -> list[Log]:
    if not folder.is_dir():
        return []
    files = sorted(folder.glob("*/*.log"))
    return [
        Log(
            hosts.get(file.parent.name, file.parent.name),
            int(file.stem) if file.stem.isdigit() else None,
            tuple(ERASED.sub("", line).rstrip() for line in read(file).splitlines()),
        )
        for file in files
    ]


def read(file: Path) -> str:
    """Beginning and end of a log, as text. DataError when it cannot be read."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            data = stream.read(HEAD)
            if size > HEAD:
                stream.seek(max(HEAD, size - TAIL))
                data += b"\n" * (size - TAIL > HEAD) + stream.read()
    except OSError as error:
        raise DataError(f"cannot read {file}", found=str(error.strerror)) from None
    return data.decode(errors="replace")


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(file: Path) -> list[dict[str, Any]]:
    found = []
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict):
            found.append(one)
    return found
