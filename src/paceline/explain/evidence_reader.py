"""Reads evidence from a run directory or from a log of any launcher, both untrusted."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
from paceline.spec.detached import DETACHED, SupervisorLocation
from paceline.spec.errors import DataError
from paceline.spec.events import Event, read_events, restore_local_paths, shipped_copies
from paceline.spec.failure import Failure, Result

HEAD_BYTES = 64 << 10  # read of a log's beginning
TAIL_BYTES = 256 << 10  # read of a log's end, where causes usually are
MAX_TOTAL_BYTES = 4 << 20  # read of all logs together, without that of the first failure
MAX_LOGS = 4096
MAX_STREAM_BYTES = 1 << 30  # read of a log that comes through a pipe
_MARKER_FILES = (names.EVENTS, names.RESULT, names.PLAN, names.OWNER, DETACHED)
# Prefixes that cannot be mistaken for ordinary text.
_UNAMBIGUOUS_LABELS = tuple(
    re.compile(pattern)
    for pattern in (
        r"^\[(?P<host>[A-Za-z0-9][\w.-]*)/(?P<rank>\d{1,9})\] ?",  # paceline
        r"^\[1,(?P<rank>\d{1,9})\]<(?:stdout|stderr|stddiag)>: ?",  # mpirun --tag-output
        r"^\[rank(?P<rank>\d{1,9})\]:?(?:\[[^\]]*\])? ?",  # torch
        r"^\[default(?P<rank>\d{1,9})\]: ?",  # torchrun --tee
    )
)
# Prefixes that may also be ordinary text; accepted when most lines have one.
_AMBIGUOUS_LABELS = tuple(
    re.compile(pattern)
    for pattern in (
        r"^(?P<host>[A-Za-z][\w-]*(?:\.[\w-]+)*): ",  # pdsh, which DeepSpeed uses
        r"^ *(?P<rank>\d{1,9}): ",  # srun -l
        r"^\[(?P<rank>\d{1,9})\] ",  # mpiexec -l
    )
)
_MIN_LABELED_SHARE = 0.6
_ROOT_CAUSE_HEADING = "Root Cause (first observed failure):"
_ROOT_CAUSE_LINES = 12  # of the summary below the heading
_FIELD = re.compile(
    r"\b(?:(?P<host>host) {0,12}: (?P<name>\S+)|(?P<key>rank|exitcode) {0,12}: (?P<n>-?\d{1,9})\b)"
)
_SUMMARY_PREFIX = re.compile(r"^(?:[EW]\d{4} [\d:.]+ +\d+ \S+\] ?)")


def from_run(path: Path, *, confirmed: bool = True) -> Evidence:
    """Reads the evidence in a run directory.

    Args:
        confirmed: Whether the host of a run that continues elsewhere has just confirmed that.

    Raises:
        DataError: ``path`` is not a run directory.
    """
    if not any(is_regular(path / name) for name in _MARKER_FILES):
        raise DataError(
            f"{path} is not a run directory",
            found="no events.jsonl, result.json or plan.json in it",
            remedy="Give the folder that the run printed (runs/NAME-DATE-TIME), or --log FILE",
        )
    launcher = _launcher(path, confirmed)
    # result.json of a run that has not ended is that of an earlier run in the same folder
    result = read_object(path / names.RESULT) if launcher is None else None
    events = read_events(read_records(path / names.EVENTS))
    return from_result(path, Result.from_json(result or {}), events, launcher)


def from_result(path: Path, result: Result, events: tuple[Event, ...],
                launcher: Launcher | None = None) -> Evidence:  # fmt: skip
    """Adds the logs and the newest checkpoint of a run directory to a known result.

    Args:
        result, events: From the launcher's memory if the run has just ended, else from files.
    """
    copies = shipped_copies(events)
    logs = [
        Log(
            log.host,
            log.rank,
            tuple(restore_local_paths(copies, log.host, line) for line in log.lines),
        )
        for log in _rank_logs(path / names.LOGS, events, result.failure)
    ]
    versions = (names.parse_version(folder.name) for folder in names.checkpoints(path))
    return Evidence(
        logs=_sort_logs(logs, result.failure, events),
        result=result,
        events=events,
        launcher=launcher,
        checkpoint_step=next((version[1] for version in versions if version), None),
        debug=tuple(debug_logs(path, events)),
    )


def _launcher(path: Path, confirmed: bool) -> Launcher | None:
    owner = read_owner(path)
    if owner is not None:
        alive = owner_alive(owner) if owner_here(owner) else None
        return Launcher(owner["host"], owner["pid"], owner["since"], alive)
    detached = detached_of(path)
    if detached is not None and not ended_since(path, detached):
        return _supervisor(detached, True if confirmed else None)
    detached = lost(path)
    return None if detached is None else _supervisor(detached, False)


def _supervisor(detached: SupervisorLocation, alive: bool | None) -> Launcher:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(detached.since))
    return Launcher(detached.host, None, since, alive)


def from_log(text: str) -> Evidence:
    """Reads the evidence in one log of any launcher."""
    failure = parse_root_cause(text)
    events: tuple[Event, ...] = ()
    if failure is not None and failure.signal is not None:
        fields = {"code": None, "signal": failure.signal}
        events = (Event("rank ended", failure.host, failure.rank, fields=fields),)
    logs = _sort_logs(split_by_rank(text), failure, events)
    return Evidence(logs, Result(failure=failure), events, debug=logs)


def _sort_logs(logs: Iterable[Log], failure: Failure | None,
               events: tuple[Event, ...]) -> tuple[Log, ...]:  # fmt: skip
    """Puts the first failing rank's log first, then ranks in the order of their bad exits."""
    bad_exits = [(event.host, event.rank) for event in events
                 if event.kind == "rank ended" and event["code"] != 0]  # fmt: skip

    def order(log: Log) -> tuple[bool, int, bool, int]:
        is_first = (failure is not None and log.rank == failure.rank
                    and log.host in (failure.host, ""))  # fmt: skip
        key = (log.host, log.rank)
        position = bad_exits.index(key) if key in bad_exits else len(bad_exits)
        return (not is_first, position, log.rank is None, log.rank or 0)

    return tuple(sorted(logs, key=order))


def _rank_logs(folder: Path, events: Sequence[Event], failure: Failure | None) -> list[Log]:
    """Reads every rank's log; of many logs less each, except of the first rank to fail."""
    hosts = {names.safe_name(event.host): event.host for event in events if event.host}
    files = log_files(folder)
    share = min(TAIL_BYTES, MAX_TOTAL_BYTES // max(1, len(files)))
    logs = []
    for file in files:
        host, rank = hosts.get(file.parent.name, file.parent.name), names.rank_of_log(file)
        is_first = failure is not None and (failure.host, failure.rank) == (host, rank)
        logs.append(Log.from_text(host, rank, read_log(file, TAIL_BYTES if is_first else share)))
    return logs


def debug_logs(path: Path, events: Sequence[Event]) -> list[Log]:
    """Reads the ranks' library logs in rank order; empty without ``--debug``."""
    return sorted(_rank_logs(path / names.DEBUG, events, None),
                  key=lambda log: (log.rank is None, log.rank or 0))  # fmt: skip


def log_files(folder: Path) -> list[Path]:
    """Lists the logs below a run's ``logs/``: regular files two levels down, no links."""
    files = (file for host_folder in folders_in(folder)
             for file in sorted(host_folder.glob("*.log")) if is_regular(file))  # fmt: skip
    return list(itertools.islice(files, MAX_LOGS))


def read_log(file: Path, tail_bytes: int = TAIL_BYTES) -> str:
    """Reads the beginning and the end of a log. Raises DataError if it cannot be read."""
    with _readable(file):
        head, tail = head_and_tail(file, min(HEAD_BYTES, tail_bytes), tail_bytes)
    return (head + b"\n" * bool(tail) + tail).decode(errors="replace")


def read_named(file: Path) -> str:
    """Reads the beginning and the end of a log that the user names.

    Unlike :func:`read_log`, it accepts links, pipes, and ``-`` for standard input.

    Raises:
        DataError: The log cannot be read.
    """
    with _readable(file):
        if str(file) == "-":
            return _read_stream(sys.stdin.buffer)
        with file.open("rb") as stream:
            return _read_stream(stream)


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"cannot read {file}", found=reason) from None


def _read_stream(stream: IO[bytes]) -> str:
    head = stream.read(HEAD_BYTES)
    chunks: deque[bytes] = deque(maxlen=2)
    num_bytes = 0
    while num_bytes < MAX_STREAM_BYTES and (chunk := stream.read(TAIL_BYTES)):
        chunks.append(chunk)
        num_bytes += len(chunk)
    tail = b"".join(chunks)
    if num_bytes > TAIL_BYTES:
        tail = b"\n" + tail[-TAIL_BYTES:]
    return (head + tail).decode(errors="replace")


# --- a log that several ranks wrote ---------------------------------------------------------------


def split_by_rank(text: str) -> list[Log]:
    """Splits a log by the prefixes of known launchers: one log a rank, then lines without prefix.

    Unknown prefixes stay in place, because rules search anywhere in a line.
    """
    lines = lines_of(text)
    labels = [*_UNAMBIGUOUS_LABELS, *_credible_labels(lines)]
    by_rank: dict[tuple[str, int | None], list[str]] = {}
    for line in lines:
        host, rank, remainder = _strip_labels(line, labels)
        by_rank.setdefault((host, rank), []).append(remainder)
    logs = [Log(host, rank, tuple(lines)) for (host, rank), lines in by_rank.items()]
    return sorted(logs, key=lambda log: (log.rank is None, log.rank or 0, log.host))


def _credible_labels(lines: Sequence[str]) -> list[re.Pattern[str]]:
    nonblank = [line for line in lines if line.strip()]
    if len(nonblank) < 3:
        return []
    threshold = _MIN_LABELED_SHARE * len(nonblank)
    return [
        label
        for label in _AMBIGUOUS_LABELS
        if sum(map(bool, map(label.match, nonblank))) >= threshold
    ]


def _strip_labels(line: str, labels: Sequence[re.Pattern[str]]) -> tuple[str, int | None, str]:
    """Host, rank and remainder of a line: a launcher's prefix, then torch's behind it."""
    host, rank = "", None
    for candidates in (labels, _UNAMBIGUOUS_LABELS):
        match = next(filter(None, (label.match(line) for label in candidates)), None)
        if match is not None:
            groups = match.groupdict()
            host = groups.get("host") or host
            rank = int(groups["rank"]) if groups.get("rank") else rank
            line = line[match.end() :]
    return host, rank, line


def parse_root_cause(text: str) -> Failure | None:
    """The first failure by torchrun's own summary, if the text has one."""
    lines = lines_of(text)
    start = next((at for at, line in enumerate(lines) if _ROOT_CAUSE_HEADING in line), len(lines))
    fields: dict[str, str] = {}
    for line in lines[start + 1 : start + 1 + _ROOT_CAUSE_LINES]:
        if match := _FIELD.search(_SUMMARY_PREFIX.sub("", line)):
            fields.setdefault(match["host"] or match["key"], match["name"] or match["n"])
    if not fields.keys() >= {"host", "rank", "exitcode"} or int(fields["rank"]) < 0:
        return None
    code = int(fields["exitcode"])
    host, rank, headline = fields["host"], int(fields["rank"]), f"exit status {code}"
    if code < 0:
        return Failure("signal", host, rank, signal=-code, headline=headline)
    return Failure("exit", host, rank, code=code, headline=headline)
