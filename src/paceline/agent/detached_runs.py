"""Requests about detached runs on this node: list, read, ask, signal, remove.

Each run has a folder below ``detached`` in the cache (see ``spec/detached.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple

from . import control
from .files import safe_paths, snapshot
from .operations import in_thread
from .supervision import processes

if TYPE_CHECKING:
    from .operations import Agent

Message = Dict[str, Any]
RECORD_FILE = "about.json"
RUN_FOLDER = "run"
LOG_FILE = "supervisor.log"
LOCK_FILE = ".paceline-probe"  # in the run directory: a launcher that lives holds a lock
FETCHED_FILE = "fetched"  # the results are where the run was started
EXIT_TIMEOUT_S = 10.0  # for a supervisor whose run is over
MAX_RUNS = 200
MAX_RECORD_BYTES = 1 << 16
MAX_OBJECT_BYTES = 1 << 18
MAX_TAIL_BYTES = 1 << 16
_RUN_ID = re.compile("[0-9a-f]{6,64}")
_FETCHED_AT_END = ("checkpoints", "model", "files")  # fetched after the run: see list_results


def run_folder(run_id: str) -> Path:
    """Returns the folder of a run on this node. ValueError for an invalid run id."""
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError("not the id of a run: %r" % run_id[:100])
    return _runs_folder() / run_id


def _runs_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "paceline" / "detached"


def _read_text(root: Path, path: str, max_bytes: int, tail: bool = False) -> str:
    """Reads the beginning or the end of a file; empty if there is none."""
    try:
        fd = safe_paths.open_file(str(root), path, os.O_RDONLY)
    except (OSError, ValueError):
        return ""
    with os.fdopen(fd, "rb") as file:
        if tail:
            file.seek(max(0, os.fstat(fd).st_size - max_bytes))
        return file.read(max_bytes).decode("utf-8", "replace")


def _read_record(folder: Path) -> Tuple[str, Message]:
    text = _read_text(folder, RECORD_FILE, MAX_RECORD_BYTES)
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(text)
        if isinstance(record, dict):
            return text, record
    return text, {}


def _run_directory(folder: Path, record: Message) -> Path:
    """Returns the run directory, which is elsewhere if the record names one."""
    path = record.get("run")
    return Path(path) if isinstance(path, str) and path.startswith("/") else folder / RUN_FOLDER


def supervisor(record: Message) -> Optional[processes.Process]:
    """Returns the supervisor's process; ``None`` if it has ended."""
    pid, start = record.get("pid"), record.get("pid_start")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 1:
        return None
    process = processes.identify(pid)
    return process if process is not None and process.start == start else None


def is_alive(folder: Path, record: Message) -> Optional[bool]:
    """Whether the supervisor lives; ``None`` if it is on another host that shares the folder.

    In a container, or on a host of the same name, it may have a process id of another namespace.
    """
    if record.get("supervisor_host") != socket.gethostname():
        return None
    return supervisor(record) is not None or _is_locked(_run_directory(folder, record), LOCK_FILE)


# --- operations ---------------------------------------------------------------------------------


@in_thread
def detached_runs(agent: Agent, request: Message, _: bytes) -> None:
    """Answers the detached runs on this node: description, state and latest metrics of each."""
    agent.reply(request, runs=[_summary(folder) for folder in _folders()[:MAX_RUNS]])


def _folders() -> List[Path]:
    """Returns the folders of detached runs, newest first."""
    try:
        entries = [
            entry
            for entry in os.scandir(str(_runs_folder()))
            if _RUN_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    except OSError:
        return []
    entries.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime, reverse=True)
    return [Path(entry.path) for entry in entries]


def _summary(folder: Path) -> Message:
    text, record = _read_record(folder)
    root = _run_directory(folder, record)
    return {
        "run_id": folder.name,
        "about": text,
        "alive": is_alive(folder, record),
        "result": _read_text(root, "result.json", MAX_OBJECT_BYTES),
        "where": _read_text(root, "ranks.json", MAX_OBJECT_BYTES),
        "metrics": _read_text(root, "metrics.jsonl", MAX_TAIL_BYTES, tail=True),
    }


@in_thread
def run_changes(agent: Agent, request: Message, _: bytes) -> None:
    """Answers the files of a run directory that changed since the last request, or all."""
    folder = run_folder(request["run_id"])
    text, record = _read_record(folder)
    if record:
        _lock_folder(agent, folder)
    root = _run_directory(folder, record)
    previous = agent.listed_files.get(folder.name, {})
    previous = {} if request["afresh"] else previous
    current = {path: (mark, size) for path, mark, size in _files(root)}
    agent.listed_files[folder.name] = current
    changed = [{"path": path, "mark": mark, "size": size}
               for path, (mark, size) in sorted(current.items())
               if previous.get(path) != (mark, size)]  # fmt: skip
    removed = sorted(previous.keys() - current.keys())
    agent.reply(request, about=text, alive=is_alive(folder, record), root=str(root),
                files=changed, gone=removed)  # fmt: skip


def _files(root: Path) -> Iterator[Tuple[str, str, int]]:
    """Yields path, version and size of the launcher's files; a change changes the version."""
    for parent, folders, names in safe_paths.walk(str(root)):
        if not parent:
            folders[:] = [f for f in folders if f not in _FETCHED_AT_END and f[0] != "."]
            names = [name for name in names if name[0] != "."]
        for name in names:
            path = os.path.join(str(root), parent, name)
            with contextlib.suppress(OSError, UnicodeEncodeError):
                status = os.lstat(path)
                name.encode()
                if stat.S_ISREG(status.st_mode):
                    mark = "%x.%x" % (status.st_ino, status.st_mtime_ns)
                    yield os.path.join(parent, name), mark, status.st_size


@in_thread
def read_part(agent: Agent, request: Message, _: bytes) -> None:
    """Answers ``count`` bytes of ``path`` from ``offset``; ``whole``: the file has no more."""
    folder = run_folder(request["run_id"])
    root = _run_directory(folder, _read_record(folder)[1])
    count = request["count"]
    with os.fdopen(safe_paths.open_file(str(root), request["path"], os.O_RDONLY), "rb") as file:
        file.seek(request["offset"])
        data = file.read(count)
        if len(data) != count or (request["whole"] and file.read(1)):
            raise ValueError("%s changed while it was read" % request["path"])
    agent.reply(request, data)


@in_thread
def request_run(agent: Agent, request: Message, _: bytes) -> None:
    """Sends ``wish`` to the run's launcher here; answers its reply as text, or null."""
    answer = control.request(request["run_id"], request["wish"])
    agent.reply(request, answer=None if answer is None else json.dumps(answer))


@in_thread
def signal_run(agent: Agent, request: Message, _: bytes) -> None:
    """Sends the supervisor SIGTERM, ``times``; answers whether it lived."""
    process = supervisor(_read_record(run_folder(request["run_id"]))[1])
    if process is not None:
        for _count in range(request["times"]):
            processes.send(process, signal.SIGTERM)
    agent.reply(request, sent=process is not None)


@in_thread
def discard_run(agent: Agent, request: Message, _: bytes) -> None:
    """Removes the folder of an ended run once nobody reads it; answers whether it is gone.

    ``fetched``: the results were fetched. The folder stays until a request has said so.
    """
    folder = run_folder(request["run_id"])
    lock = agent.run_locks.pop(folder.name, None)
    if lock is not None:
        os.close(lock)
    is_removed = False
    if _has_ended(folder):
        if request["fetched"]:
            os.close(safe_paths.open_file(str(folder), FETCHED_FILE, os.O_WRONLY | os.O_CREAT))
        if (folder / FETCHED_FILE).exists() and not _is_locked(folder):
            snapshot.remove_folder(folder)
            is_removed = True
    agent.reply(request, gone=is_removed)


def _has_ended(folder: Path) -> bool:
    """Whether the supervisor has gone; waits for one that has reported the end."""
    record, deadline = _read_record(folder)[1], time.monotonic() + EXIT_TIMEOUT_S
    has_reported = record.get("ended") is not None
    while is_alive(folder, record) and has_reported and time.monotonic() < deadline:
        time.sleep(EXIT_TIMEOUT_S / 200)
    return is_alive(folder, record) is False


def _lock_folder(agent: Agent, folder: Path) -> None:
    """Keeps the folder while this agent reads it."""
    if folder.name in agent.run_locks:
        return
    with contextlib.suppress(OSError):  # there is nothing yet that could be removed
        fd = _open_lock(folder)
        if agent.run_locks.setdefault(folder.name, fd) != fd:  # another thread was faster
            os.close(fd)
            return
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a disk may have none


def _open_lock(folder: Path, name: str = LOG_FILE) -> int:
    """Opens a file of the run that is never replaced: NFS locks no folders."""
    create = os.O_CREAT if name == LOG_FILE else 0
    return safe_paths.open_file(str(folder), name, os.O_RDWR | create)


def release_folders(locks: Dict[str, int]) -> None:
    """Unlocks folders at the agent's end and removes those discarded meanwhile."""
    for run_id, fd in locks.items():
        os.close(fd)
        folder = run_folder(run_id)
        with contextlib.suppress(OSError):  # it has gone meanwhile
            # in this order: whoever writes that word while we look finds it read, and leaves it
            if not _is_locked(folder) and (folder / FETCHED_FILE).exists():
                snapshot.remove_folder(folder)


def _is_locked(folder: Path, name: str = LOG_FILE) -> bool:
    with contextlib.suppress(OSError):
        fd = _open_lock(folder, name)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


OPERATIONS: "Dict[str, Callable[[Agent, Message, bytes], None]]" = {
    "detached_runs": detached_runs,
    "run_changes": run_changes,
    "read_part": read_part,
    "ask_run": request_run,
    "signal_run": signal_run,
    "discard_run": discard_run,
}
