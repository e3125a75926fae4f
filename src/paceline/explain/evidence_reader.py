"""Reads evidence from a run directory or from a log of any launcher, both untrusted."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from paceline.explain.documents import code_blocks, is_document, is_report
from paceline.explain.evidence import (
    MISSED_FILE,
    MISSED_MODULE,
    Evidence,
    Launcher,
    Log,
    lines_of,
)
from paceline.explain.prefixes import Line, strip_prefixes
from paceline.rundir.outputs import script_checkpoint
from paceline.rundir.ownership import (
    detached_of,
    lost,
    owner_alive,
    owner_here,
    read_of_last_start,
    read_owner,
    start_id,
)
from paceline.rundir.records import (
    as_text,
    folders_in,
    head_and_tail,
    is_regular,
    object_in,
    objects_in,
    read_object,
    read_records,
)
from paceline.spec import rundir as names
from paceline.spec.detached import DETACHED, SupervisorLocation
from paceline.spec.errors import DataError
from paceline.spec.events import (
    Event,
    ShippedCopy,
    events_of_start,
    last_attempt,
    log_offsets,
    read_events,
    restore_local_paths,
    shipped_copies,
)
from paceline.spec.failure import Failure, Result
from paceline.spec.formatting import DATE_TIME, format_time
from paceline.transfer.git import run_git
from paceline.transfer.tree import is_no_project

HEAD_BYTES = 64 << 10  # read of a log's beginning
TAIL_BYTES = 256 << 10  # read of a log's end, where causes usually are
MAX_TOTAL_BYTES = 4 << 20  # read of all logs together, without that of the first failure
MAX_LOGS = 4096
STREAM_HEAD_BYTES = 1 << 20  # read of a log that the user names
STREAM_TAIL_BYTES = 3 << 20
MAX_STREAM_BYTES = 1 << 30  # read of a log that comes through a pipe
_MAX_MISSED_FILES = 100  # that are looked up
_SYSTEM_FOLDERS = ("/bin/", "/boot/", "/dev/", "/etc/", "/lib/", "/lib64/", "/opt/", "/proc/",
                   "/run/", "/sbin/", "/sys/", "/usr/", "/var/")  # fmt: skip
_MARKER_FILES = (names.EVENTS, names.RESULT, names.PLAN, names.OWNER, DETACHED)


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
    result = read_of_last_start(path, names.RESULT)
    launcher = _launcher(path, confirmed) if result is None else None
    events = read_events(read_records(path / names.EVENTS))
    events = events_of_start(events, start_id(path))
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
        for log in _rank_logs(path / names.LOGS, events, result.failure, log_offsets(events))
    ]
    plan = read_object(path / names.PLAN) or {}
    versions = (names.parse_version(folder.name) for folder in names.checkpoints(path))
    ignored, unsent = _missed_files(logs, copies, plan)
    return Evidence(
        logs=_sort_logs(logs, result.failure, last_attempt(events)),
        result=result,
        events=events,
        launcher=launcher,
        checkpoint_step=next((version[1] for version in versions if version), None),
        script_checkpoint=script_checkpoint(path),
        debug=tuple(debug_logs(path, events)),
        ignored_files=ignored,
        unsent_files=unsent,
        checkouts={as_text(node.get("host")): as_text(node.get("workdir"))
                   for node in objects_in(plan.get("nodes")) if node.get("code") != "shipped"},
        project_modules=_project_modules(logs, plan),
    )  # fmt: skip


def _missed_files(logs: Iterable[Log], copies: Sequence[ShippedCopy],
                  plan: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:  # fmt: skip
    """Files of this machine that ranks missed on hosts with a copy of the code.

    Args:
        logs: With the paths of this machine.
        plan: Content of the run's ``plan.json``, with the work folders of the hosts.

    Returns:
        Files and folders (with a slash at the end) of the project that git ignores, and files
        outside it; each by the path or the module that the logs name.
    """
    folders = _local_workdirs(copies, plan)
    copies = [copy for copy in copies if not copy[1].endswith("/paceline")]  # not the user's code
    ignored: dict[str, str] = {}
    unsent: dict[str, str] = {}
    for source in {source for _, _, source in copies}:
        hosts = {host for host, _, folder in copies if folder == source}
        missed = {
            (log.host, pattern, match["path"])
            for log in logs if log.host in hosts
            for line in log.lines
            for pattern in (MISSED_FILE, MISSED_MODULE) if (match := pattern.search(line))
        }  # fmt: skip
        names: dict[str, str] = {}  # by file
        for host, pattern, name in sorted(missed, key=lambda miss: miss[2])[:_MAX_MISSED_FILES]:
            roots = [*folders.get(host, ()), source]
            paths = _module_files(roots, name) if pattern is MISSED_MODULE else [
                os.path.normpath(f"{root}/{name}") if name[0] != "/" else os.path.normpath(name)
                for root in roots[:1]
            ]  # fmt: skip
            present = [path for path in paths if _is_file(path) or _is_folder(path)]
            names |= {path: name for path in present if path.startswith(f"{source}/")}
            is_data = pattern is MISSED_FILE and present and _is_file(present[0])
            if is_data and _is_data(present[0], source):
                unsent[name] = present[0]
        if files := [*filter(_is_file, names)]:
            output = run_git(Path(source), "--literal-pathspecs", "ls-files", "-z", "--others",
                             "--ignored", "--exclude-standard", "--", *files)  # fmt: skip
            listed = (f"{source}/{path}" for path in (output or "").split("\0"))
            ignored |= {names[path]: path for path in listed if path in names}
        for folder in filter(_is_folder, names):
            if run_git(Path(source), "check-ignore", "-q", "--", folder) is not None:
                ignored[names[folder]] = f"{_enclosing_argument(folder, source, plan)}/"
    return ignored, unsent


def _enclosing_argument(folder: str, project: str, plan: Mapping[str, Any]) -> str:
    """Returns the folder of the project that an argument names and that holds ``folder``, or it."""
    args = object_in(plan, "entry").get("args")
    values = (value for arg in (args if isinstance(args, list) else ()) for value in
             (as_text(arg), as_text(arg).partition("=")[2]))  # fmt: skip
    paths = (os.path.normpath(Path(project, value)) for value in values if value)
    return next((path for path in paths if path.startswith(f"{project}/")
                 and f"{folder}/".startswith(f"{path}/")), folder)  # fmt: skip


def _is_file(path: str) -> bool:
    """Whether a file exists; a log may name paths that are too long."""
    with contextlib.suppress(OSError):
        return Path(path).is_file()
    return False


def _is_folder(path: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(path).is_dir()
    return False


def _is_data(path: str, project: str) -> bool:
    """Whether a file may be data of the user, in a folder that can be sent as a whole."""
    folder = Path(path).parent
    is_code = Path(project).is_relative_to(folder) or folder.is_relative_to(project)
    is_personal = "/." in path or is_no_project(folder)
    return not (is_code or is_personal or path.startswith(_SYSTEM_FOLDERS))


def _local_workdirs(copies: Sequence[ShippedCopy], plan: Mapping[str, Any]) -> dict[str, list[str]]:
    """The work folder of each host and the folder of the script, as paths of this machine."""
    folders: dict[str, list[str]] = {}
    with contextlib.suppress(KeyError, TypeError):
        for node in plan["nodes"]:
            host, entry = str(node["host"]), node["entry"]
            workdir = restore_local_paths(copies, host, str(node["workdir"]))
            script = restore_local_paths(copies, host, str(entry["target"]))
            is_script = entry["kind"] == "script"
            folders[host] = [workdir, *([str(Path(workdir, script).parent)] if is_script else [])]
    return folders


def _project_modules(logs: Iterable[Log], plan: Mapping[str, Any]) -> dict[str, str]:
    """Files of this machine of modules that ranks missed, by module; paths from the work folder."""
    folder, entry = as_text(object_in(plan, "typed").get("folder")), object_in(plan, "entry")
    if not folder:
        return {}
    script = as_text(entry.get("target")) if entry.get("kind") == "script" else ""
    folders = [folder, str(Path(folder, script).parent)]
    missed = {match["path"] for log in logs for line in log.lines
              if (match := MISSED_MODULE.search(line))}  # fmt: skip
    files = {
        module: next(filter(_is_file, _module_files(folders, module)), "")
        for module in sorted(missed)[:_MAX_MISSED_FILES]
    }
    return {module: os.path.relpath(file, folder) for module, file in files.items() if file}


def _module_files(folders: Sequence[str], module: str) -> list[str]:
    """Files in which Python would find a module, if it looked into these folders."""
    files: list[str] = []
    for folder in folders:
        base = Path(os.path.normpath(folder), *module.split("."))
        with contextlib.suppress(OSError):  # the log may name a module of any length
            in_package = itertools.islice(base.glob("*.py"), 1)
            extensions = itertools.islice(base.parent.glob(f"{base.name}.*.so"), 1)
            files += map(str, (base.with_name(f"{base.name}.py"), base / "__init__.py", *in_package,
                               *extensions))  # fmt: skip
    return files


def _launcher(path: Path, confirmed: bool) -> Launcher | None:
    owner = read_owner(path)
    if owner is not None:
        alive = owner_alive(owner) if owner_here(owner) else None
        return Launcher(owner["host"], owner["pid"], owner["since"], alive)
    detached = detached_of(path)
    if detached is not None:
        return _supervisor(detached, True if confirmed else None)
    detached = lost(path)
    return None if detached is None else _supervisor(detached, False)


def _supervisor(detached: SupervisorLocation, alive: bool | None) -> Launcher:
    return Launcher(detached.host, None, format_time(detached.since, DATE_TIME), alive)


def from_log(text: str) -> Evidence:
    """Reads the evidence in one log of any launcher; a document that quotes messages has none."""
    logs = split_by_rank(text)
    return Evidence(tuple(logs), debug=tuple(logs))


def _sort_logs(logs: Iterable[Log], failure: Failure | None,
               events: Sequence[Event]) -> tuple[Log, ...]:  # fmt: skip
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


def _rank_logs(folder: Path, events: Sequence[Event], failure: Failure | None,
               offsets: Mapping[tuple[str, int | None], int]) -> list[Log]:  # fmt: skip
    """Reads what every rank has written since its last start in the last attempt.

    Of many logs it reads less each, except of the first rank to fail.
    """
    hosts = {names.safe_name(event.host): event.host for event in events if event.host}
    starts = [event for event in last_attempt(events) if event.kind == "rank started"]
    starts = starts or [event for event in events if event.kind == "rank started"]
    started = {(event.host, event.rank) for event in starts}
    hosts_of_ranks = {event.rank: event.host for event in starts}  # that moved, the last one
    files = log_files(folder)
    share = min(TAIL_BYTES, MAX_TOTAL_BYTES // max(1, len(files)))
    logs = []
    for file in files:
        host, rank = hosts.get(file.parent.name, file.parent.name), names.rank_of_log(file)
        is_first = failure is not None and (failure.host, failure.rank) == (host, rank)
        if rank is not None and started:
            if (host, rank) not in started:
                continue  # of an earlier start
            if hosts_of_ranks[rank] != host and not is_first:
                continue  # of a process that was replaced on another host
        tail_bytes, begin = TAIL_BYTES if is_first else share, offsets.get((host, rank), 0)
        logs.append(Log.from_text(host, rank, read_log(file, tail_bytes, begin)))
    return logs


def debug_logs(path: Path, events: Sequence[Event]) -> list[Log]:
    """Reads the ranks' library logs in rank order; empty without ``--debug``."""
    offsets = log_offsets(events, "debug log begins")
    return sorted(_rank_logs(path / names.DEBUG, events, None, offsets),
                  key=lambda log: (log.rank is None, log.rank or 0))  # fmt: skip


def log_files(folder: Path) -> list[Path]:
    """Lists the logs below a run's ``logs/``: regular files two levels down, no links."""
    files = (file for host_folder in folders_in(folder)
             for file in sorted(host_folder.glob("*.log")) if is_regular(file))  # fmt: skip
    return list(itertools.islice(files, MAX_LOGS))


def read_log(file: Path, tail_bytes: int = TAIL_BYTES, begin: int = 0) -> str:
    """Reads the beginning, from byte ``begin``, and the end of a log.

    Raises:
        DataError: It cannot be read.
    """
    with _readable(file):
        head, tail = head_and_tail(file, min(HEAD_BYTES, tail_bytes), tail_bytes, begin)
    return _decode(head, tail, is_cut=bool(tail))


def read_named(file: Path) -> str:
    """Reads the beginning and the end of a log that the user names.

    Unlike :func:`read_log`, it accepts links, a shell's ``<(…)``, and ``-`` for standard input.

    Raises:
        DataError: The log cannot be read.
    """
    with _readable(file):
        # bash's <(…) is in /dev/fd, zsh's in /proc/self/fd
        if file.is_fifo() and file.parts[:2] not in (("/", "dev"), ("/", "proc")):
            raise DataError(
                f"{file} is a named pipe, and nobody may be writing to it",
                remedy="name a file, or pass a command's output:"
                " COMMAND | paceline explain --log -",
            )
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
    head = stream.read(STREAM_HEAD_BYTES)
    chunks: deque[bytes] = deque(maxlen=2)
    num_bytes = 0
    while num_bytes < MAX_STREAM_BYTES and (chunk := stream.read(STREAM_TAIL_BYTES)):
        chunks.append(chunk)
        num_bytes += len(chunk)
    tail = b"".join(chunks)
    return _decode(head, tail[-STREAM_TAIL_BYTES:], is_cut=num_bytes > STREAM_TAIL_BYTES)


def _decode(head: bytes, tail: bytes, *, is_cut: bool) -> str:
    """Decodes both ends of a log in its encoding.

    Args:
        is_cut: Whether ``tail`` does not continue ``head``.
    """
    encoding = _encoding(head)
    parts = (head, tail) if is_cut else (head + tail,)
    text = "\n".join(part.decode(encoding, errors="replace") for part in parts)
    return text.removeprefix("\ufeff")


def _encoding(head: bytes) -> str:
    """UTF-16 if the log begins with its mark, or most characters of it have a zero byte."""
    sample = head[:4096]
    for encoding, mark, zero_at in (("utf-16-le", b"\xff\xfe", 1), ("utf-16-be", b"\xfe\xff", 0)):
        zeros = sample[zero_at::2].count(0)
        if sample.startswith(mark) or (
            zeros > len(sample) // 4 and 0 not in sample[1 - zero_at :: 2]
        ):
            return encoding
    return "utf-8"


# --- a log that several ranks wrote ---------------------------------------------------------------


def split_by_rank(text: str) -> list[Log]:
    """Splits a log by the prefixes of its lines: one log a rank, then lines without prefix."""
    return _split(_log_lines(lines_of(text)))


def _log_lines(lines: Sequence[str]) -> Sequence[str]:
    """The lines of a log; none of a document, unless it reports one failure and shows its log."""
    if not is_document(lines):
        return lines
    blocks = code_blocks(lines) if is_report(lines) else []
    failed = [block for block in blocks if Evidence(tuple(_split(block))).outcome.has_failed]
    return failed[0] if len(failed) == 1 else ()


def _split(lines: Sequence[str]) -> list[Log]:
    streams: dict[tuple[str, int | None], list[Line]] = {}
    for line in strip_prefixes(lines):
        streams.setdefault((line.host, line.rank), []).append(line)
    logs = [
        Log(host, rank, tuple(line.text for line in lines), tuple(line.number for line in lines))
        for (host, rank), lines in streams.items()
    ]
    return sorted(logs, key=lambda log: (log.rank is None, log.rank or 0, log.host))
