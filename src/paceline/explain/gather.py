"""Reads evidence: a run directory, or any log. Both may hold anything."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from paceline.explain.evidence import Evidence, Launcher, Log, lines_of
from paceline.rundir.ownership import (
    detached_of,
    ended_since,
    lost,
    owner_alive,
    owner_here,
    read_owner,
)
from paceline.rundir.records import (
    folders_in,
    head_and_tail,
    is_regular,
    read_object,
    read_records,
)
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED
from paceline.spec.errors import DataError
from paceline.spec.events import Event, at_home, homes, read_events
from paceline.spec.failure import Failure, Result

HEAD = 64 << 10  # bytes read of a log's beginning
TAIL = 256 << 10  # and of its end, where causes stand
ALL_LOGS = 4 << 20  # bytes read of all logs together, beside that of the rank that failed first
MOST_LOGS = 4096
STREAM = 1 << 30  # bytes taken of a log that comes through a pipe
_SIGNS = (names.EVENTS, names.RESULT, names.PLAN, names.OWNER, DETACHED)
# Labels that cannot be mistaken for text.
_SURE = tuple(
    re.compile(pattern)
    for pattern in (
        r"^\[(?P<host>[A-Za-z0-9][\w.-]*)/(?P<rank>\d{1,9})\] ?",  # paceline
        r"^\[1,(?P<rank>\d{1,9})\]<(?:stdout|stderr|stddiag)>: ?",  # mpirun --tag-output
        r"^\[rank(?P<rank>\d{1,9})\]:?(?:\[[^\]]*\])? ?",  # torch
        r"^\[default(?P<rank>\d{1,9})\]: ?",  # torchrun --tee
    )
)
# Labels that may be text: believed when most lines have one.
_LIKELY = tuple(
    re.compile(pattern)
    for pattern in (
        r"^(?P<host>[A-Za-z][\w-]*(?:\.[\w-]+)*): ",  # pdsh, and with it DeepSpeed
        r"^ *(?P<rank>\d{1,9}): ",  # srun -l
        r"^\[(?P<rank>\d{1,9})\] ",  # mpiexec -l
    )
)
_MOST = 0.6
_ROOT = "Root Cause (first observed failure):"
_ROOT_LINES = 12  # of the summary below it
_FIELD = re.compile(
    r"\b(?:(?P<host>host) {0,12}: (?P<name>\S+)|(?P<key>rank|exitcode) {0,12}: (?P<n>-?\d{1,9})\b)"
)
_SUMMARY = re.compile(r"^(?:[EW]\d{4} [\d:.]+ +\d+ \S+\] ?)")


def from_run(path: Path, *, asked: bool = True) -> Evidence:
    """The evidence of a run directory. DataError when it is none.

    Args:
        path: The run directory.
        asked: Of a run that goes on on another host: that has just said so.
    """
    if not any(is_regular(path / name) for name in _SIGNS):
        raise DataError(
            f"{path} is not a run directory",
            found="no events.jsonl, result.json or plan.json in it",
            remedy="Give the folder that the run printed (runs/NAME-DATE-TIME), or --log FILE",
        )
    launcher = _launcher(path, asked)
    # a run that has not ended leaves the result of the one before it in the folder
    said = read_object(path / names.RESULT) if launcher is None else None
    events = read_events(read_records(path / names.EVENTS))
    return of_run(path, Result.from_json(said or {}), events, launcher)


def of_run(path: Path, result: Result, events: tuple[Event, ...],
           launcher: Launcher | None = None) -> Evidence:  # fmt: skip
    """The evidence of a run of which it is known how it ended and what happened.

    Args:
        path: The run directory, for the logs and checkpoints in it.
        result, events: Of a run that has just ended as its launcher had them, else from its files.
        launcher: Whose run it still is.
    """
    first, copies = result.failure, homes(events)
    found = [
        Log(log.host, log.rank, tuple(at_home(copies, log.host, line) for line in log.lines))
        for log in _rank_logs(path / names.LOGS, _hosts_of(events), first)
    ]
    return Evidence(
        logs=tuple(_ordered(found, first, events)),
        result=result,
        events=events,
        launcher=launcher,
        checkpoint=_newest_step(path),
        debug=tuple(debug_logs(path, events)),
    )


def _newest_step(path: Path) -> int | None:
    found = (names.version_of(one.name) for one in names.checkpoints(path))
    return next((version[1] for version in found if version), None)


def _launcher(path: Path, asked: bool) -> Launcher | None:
    owner = read_owner(path)
    if owner is not None:
        alive = owner_alive(owner) if owner_here(owner) else None
        return Launcher(owner["host"], owner["pid"], owner["since"], alive)
    away = detached_of(path)
    if away is not None and not ended_since(path, away):
        return Launcher(away.host, None, _moment(away.since), True if asked else None)
    left = lost(path)
    return None if left is None else Launcher(left.host, None, _moment(left.since), False)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def from_log(text: str) -> Evidence:
    """The evidence of one log, of whatever launcher."""
    first = root_cause(text)
    found = split(text)
    events: tuple[Event, ...] = ()
    if first is not None and first.signal is not None:
        ended = {"code": None, "signal": first.signal}
        events = (Event("rank ended", first.host, first.rank, fields=ended),)
    logs = tuple(_ordered(found, first, events))
    return Evidence(logs, Result(failure=first), events, debug=logs)


def _ordered(found: Iterable[Log], first: Failure | None, events: tuple[Event, ...]) -> list[Log]:
    """The first failing rank's log first; then ranks in the order of their bad ends."""
    bad = [(one.host, one.rank) for one in events
           if one.kind == "rank ended" and one["code"] != 0]  # fmt: skip

    def order(log: Log) -> tuple[bool, int, bool, int]:
        is_first = first is not None and log.rank == first.rank and log.host in (first.host, "")
        key = (log.host, log.rank)
        place = bad.index(key) if key in bad else len(bad)
        return (not is_first, place, log.rank is None, log.rank or 0)

    return sorted(found, key=order)


def _hosts_of(events: Sequence[Event]) -> dict[str, str]:
    """Host by the name of its folder among the logs."""
    return {names.safe(event.host): event.host for event in events if event.host}


def _rank_logs(folder: Path, hosts: Mapping[str, str], first: Failure | None) -> list[Log]:
    """Every rank's log; of many logs less each, but all of that of the first to fail."""
    files = log_files(folder)
    share = min(TAIL, ALL_LOGS // max(1, len(files)))
    found = []
    for file in files:
        host, rank = hosts.get(file.parent.name, file.parent.name), names.rank_of(file)
        failed_first = first is not None and (first.host, first.rank) == (host, rank)
        found.append(Log.of(host, rank, read(file, TAIL if failed_first else share)))
    return found


def debug_logs(path: Path, events: Sequence[Event]) -> list[Log]:
    """What the libraries of a run's ranks told, by rank; empty without ``--debug``."""
    return sorted(_rank_logs(path / names.DEBUG, _hosts_of(events), None),
                  key=lambda log: (log.rank is None, log.rank or 0))  # fmt: skip


def log_files(folder: Path) -> list[Path]:
    """The logs below a run's ``logs/``: regular files two levels down, no links."""
    found = []
    for host in folders_in(folder):
        found += [file for file in sorted(host.glob("*.log")) if is_regular(file)]
        if len(found) >= MOST_LOGS:
            break
    return found[:MOST_LOGS]


def read(file: Path, tail: int = TAIL) -> str:
    """Beginning and end of a log, as text. DataError when it cannot be read."""
    try:
        begin, end = head_and_tail(file, min(HEAD, tail), tail)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise DataError(f"cannot read {file}", found=found) from None
    return (begin + b"\n" * bool(end) + end).decode(errors="replace")


def read_given(file: Path) -> str:
    """Beginning and end of a log that the user names: also a link, a pipe, or - for the input.

    DataError when it cannot be read.
    """
    try:
        if str(file) == "-":
            return _read_stream(sys.stdin.buffer)
        with file.open("rb") as stream:
            return _read_stream(stream)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise DataError(f"cannot read {file}", found=found) from None


def _read_stream(stream: IO[bytes]) -> str:
    begin = stream.read(HEAD)
    ends: deque[bytes] = deque(maxlen=2)
    taken = 0
    while taken < STREAM and (part := stream.read(TAIL)):
        ends.append(part)
        taken += len(part)
    end = b"".join(ends)
    cut = b"\n" * (taken > TAIL)
    return (begin + cut + (end[-TAIL:] if cut else end)).decode(errors="replace")


# --- a log that several ranks wrote ---------------------------------------------------------------


def split(text: str) -> list[Log]:
    """One log a rank, by the labels of known launchers, then what bears none; ranks in order.

    Unknown labels are left in place: rules look for words anywhere in a line.
    """
    lines = lines_of(text)
    labels = [*_SURE, *_believed(lines)]
    found: dict[tuple[str, int | None], list[str]] = {}
    for line in lines:
        who, rest = _label(line, labels)
        found.setdefault(who, []).append(rest)
    ranked = sorted(found, key=lambda who: (who[1] is None, who[1] or 0, who[0]))
    return [Log(host, rank, tuple(found[host, rank])) for host, rank in ranked]


def _believed(lines: Sequence[str]) -> list[re.Pattern[str]]:
    written = [line for line in lines if line.strip()]
    return [
        pattern
        for pattern in _LIKELY
        if len(written) >= 3
        and sum(bool(pattern.match(line)) for line in written) >= _MOST * len(written)
    ]


def _label(line: str, labels: Sequence[re.Pattern[str]]) -> tuple[tuple[str, int | None], str]:
    host, rank = "", None
    for known in (labels, _SURE):  # a launcher's label, and torch's behind it
        for label in known:
            if match := label.match(line):
                groups = match.groupdict()
                host = groups.get("host") or host
                rank = int(groups["rank"]) if groups.get("rank") else rank
                line = line[match.end() :]
                break
    return (host, rank), line


def root_cause(text: str) -> Failure | None:
    """Who failed first by torchrun's own summary, when the text has one."""
    lines = lines_of(text)
    start = next((at for at, line in enumerate(lines) if _ROOT in line), len(lines))
    said: dict[str, str] = {}
    for line in lines[start + 1 : start + 1 + _ROOT_LINES]:
        if found := _FIELD.search(_SUMMARY.sub("", line)):
            said.setdefault(found["host"] or found["key"], found["name"] or found["n"])
    if not said.keys() >= {"host", "rank", "exitcode"} or int(said["rank"]) < 0:
        return None
    code = int(said["exitcode"])
    host, rank, headline = said["host"], int(said["rank"]), f"exit status {code}"
    if code < 0:
        return Failure("signal", host, rank, signal=-code, headline=headline)
    return Failure("exit", host, rank, code=code, headline=headline)
