"""Runs whose supervisor is on this node: what there are, what is new of one, what it is asked.

Such a run has a folder below ``detached`` in the cache (see ``spec/detached.py``). Whoever logs in
as its user may read the run directory in it piece by piece, ask the supervisor through its socket
(:mod:`.control`), and remove the folder once the run is over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Tuple

from . import control
from .files import safe_paths, snapshot
from .supervision import processes

if TYPE_CHECKING:
    from .server import Agent

Message = Dict[str, Any]
ABOUT = "about.json"
RUN = "run"
LOG = "supervisor.log"
FETCHED = "fetched"  # the results are where the run was started
ENDS_S = 10.0  # for a supervisor whose run is over
MOST_RUNS = 200
ABOUT_BYTES = 1 << 16
OBJECT_BYTES = 1 << 18
RECORDS_BYTES = 1 << 16
_RUN_ID = re.compile("[0-9a-f]{6,64}")
_LATER = ("checkpoints", "model", "files")  # come when the run is over: see list_results


def folder_of(run_id: str) -> Path:
    """The folder of a run here. ValueError for what is no id of one."""
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError("not the id of a run: %r" % run_id[:100])
    return _parent() / run_id


def _parent() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "paceline" / "detached"


def _text(root: Path, path: str, most: int, tail: bool = False) -> str:
    """The beginning or the end of a file; empty where there is none."""
    try:
        fd = safe_paths.open_file(str(root), path, os.O_RDONLY)
    except (OSError, ValueError):
        return ""
    with os.fdopen(fd, "rb") as file:
        if tail:
            file.seek(max(0, os.fstat(fd).st_size - most))
        return file.read(most).decode("utf-8", "replace")


def _about(folder: Path) -> Tuple[str, Message]:
    text = _text(folder, ABOUT, ABOUT_BYTES)
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(text)
        if isinstance(said, dict):
            return text, said
    return text, {}


def _root(folder: Path, about: Message) -> Path:
    """The run directory."""
    said = about.get("run")
    return Path(said) if isinstance(said, str) and said.startswith("/") else folder / RUN


def supervisor(about: Message) -> Optional[processes.Process]:
    """The supervisor's process, if it lives."""
    pid, start = about.get("pid"), about.get("pid_start")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 1:
        return None
    found = processes.identify(pid)
    return found if found is not None and found.start == start else None


def alive(about: Message) -> Optional[bool]:
    """Whether the supervisor lives; ``None`` where it is on another host that shares the folder."""
    if about.get("supervisor_host") != socket.gethostname():
        return None
    return supervisor(about) is not None


# --- operations ---------------------------------------------------------------------------------


def detached_runs(agent: Agent, request: Message, _: bytes) -> None:
    """Every run that was left here: what it is, whether it runs, the newest of it."""

    def work() -> None:
        agent.reply(request, runs=[_summary(folder) for folder in _folders()[:MOST_RUNS]])

    agent.in_thread(work, request)


def _folders() -> List[Path]:
    """The newest first."""
    try:
        found = [one for one in os.scandir(str(_parent()))
                 if _RUN_ID.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]  # fmt: skip
    except OSError:
        return []
    found.sort(key=lambda one: one.stat(follow_symlinks=False).st_mtime, reverse=True)
    return [Path(one.path) for one in found]


def _summary(folder: Path) -> Message:
    text, about = _about(folder)
    root = _root(folder, about)
    return {
        "run_id": folder.name,
        "about": text,
        "alive": alive(about),
        "result": _text(root, "result.json", OBJECT_BYTES),
        "where": _text(root, "ranks.json", OBJECT_BYTES),
        "metrics": _text(root, "metrics.jsonl", RECORDS_BYTES, tail=True),
    }


def run_changes(agent: Agent, request: Message, _: bytes) -> None:
    """What of a run directory is other than it was when this was asked last.

    Args:
        agent: Remembers what it told.
        request: ``run_id``; ``afresh``: nothing was asked before.
    """

    def work() -> None:
        folder = folder_of(request["run_id"])
        text, about = _about(folder)
        if about:
            _read_from_now(agent, folder)
        root = _root(folder, about)
        known = agent.told.get(folder.name, {})
        known = {} if request["afresh"] else known
        now = {path: (mark, size) for path, mark, size in _files(root)}
        agent.told[folder.name] = now
        changed = [{"path": path, "mark": mark, "size": size}
                   for path, (mark, size) in sorted(now.items())
                   if known.get(path) != (mark, size)]  # fmt: skip
        gone = sorted(known.keys() - now.keys())
        agent.reply(request, about=text, alive=alive(about), root=str(root),
                    files=changed, gone=gone)  # fmt: skip

    agent.in_thread(work, request)


def _files(root: Path) -> Iterator[Tuple[str, str, int]]:
    """Path, mark and size of what the launcher writes there; the mark changes with the file."""
    for above, folders, names in safe_paths.walk(str(root)):
        top = not above
        folders[:] = [one for one in folders if not (top and (one in _LATER or one[0] == "."))]
        for name in names:
            path = os.path.join(str(root), above, name)
            with contextlib.suppress(OSError, UnicodeEncodeError):
                stat = os.lstat(path)
                name.encode()
                if (top and name[0] == ".") or not os.path.isfile(path) or os.path.islink(path):
                    continue
                yield os.path.join(above, name), "%x.%x" % (
                    stat.st_ino, stat.st_mtime_ns), stat.st_size  # fmt: skip


def read_part(agent: Agent, request: Message, _: bytes) -> None:
    """``count`` bytes of ``path`` in the run directory, from ``offset`` on.

    ``whole``: of a file that has no more than these.
    """

    def work() -> None:
        folder = folder_of(request["run_id"])
        root = _root(folder, _about(folder)[1])
        count = request["count"]
        with os.fdopen(safe_paths.open_file(str(root), request["path"], os.O_RDONLY), "rb") as file:
            file.seek(request["offset"])
            data = file.read(count)
            if len(data) != count or (request["whole"] and file.read(1)):
                raise ValueError("%s changed while it was read" % request["path"])
        agent.reply(request, data)

    agent.in_thread(work, request)


def ask_run(agent: Agent, request: Message, _: bytes) -> None:
    """Asks the run's launcher on this node: ``wish``; its answer as text, null where none is."""

    def work() -> None:
        answer = control.ask(request["run_id"], request["wish"])
        agent.reply(request, answer=None if answer is None else json.dumps(answer))

    agent.in_thread(work, request)


def signal_run(agent: Agent, request: Message, _: bytes) -> None:
    """SIGTERM for the supervisor, ``times``; whether it lived."""

    def work() -> None:
        process = supervisor(_about(folder_of(request["run_id"]))[1])
        for _ in range(request["times"] if process is not None else 0):
            assert process is not None
            processes.send(process, signal.SIGTERM)
        agent.reply(request, sent=process is not None)

    agent.in_thread(work, request)


def discard_run(agent: Agent, request: Message, _: bytes) -> None:
    """Removes the folder of a run that is over, once nobody reads it any more; whether it is gone.

    ``fetched``: everything is at home. Else it stays, unless somebody has said so before.
    """

    def work() -> None:
        folder = folder_of(request["run_id"])
        own = agent.reading.pop(folder.name, None)
        if own is not None:
            os.close(own)
        gone = False
        if _is_over(_about(folder)[1]):
            if request["fetched"]:
                os.close(safe_paths.open_file(str(folder), FETCHED, os.O_WRONLY | os.O_CREAT))
            if (folder / FETCHED).exists() and not _is_read(folder):
                snapshot.remove_tree(folder)
                gone = True
        agent.reply(request, gone=gone)

    agent.in_thread(work, request)


def _is_over(about: Message) -> bool:
    """Whether the supervisor has gone. One that has told how the run ended is about to."""
    until = time.monotonic() + ENDS_S
    while alive(about) and about.get("ended") is not None and time.monotonic() < until:
        time.sleep(ENDS_S / 200)
    return alive(about) is False


def _read_from_now(agent: Agent, folder: Path) -> None:
    """As long as this agent lives, and does not say otherwise, the folder stays."""
    if folder.name not in agent.reading:
        with contextlib.suppress(OSError):  # there is nothing yet that could be removed
            agent.reading[folder.name] = fd = _opened_for_locks(folder)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a disk may have none


def _opened_for_locks(folder: Path) -> int:
    """A file of the run that nobody replaces: NFS locks no folders, and nothing open to be read."""
    return safe_paths.open_file(str(folder), LOG, os.O_RDWR | os.O_CREAT)


def let_go(reading: Dict[str, int]) -> None:
    """The end of an agent. Who discarded a folder that it still read has left that to it."""
    for run_id, fd in reading.items():
        os.close(fd)
        folder = folder_of(run_id)
        with contextlib.suppress(OSError):  # it has gone meanwhile
            # in this order: whoever writes that word while we look finds it read, and leaves it
            if not _is_read(folder) and (folder / FETCHED).exists():
                snapshot.remove_tree(folder)


def _is_read(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        fd = _opened_for_locks(folder)
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
    "ask_run": ask_run,
    "signal_run": signal_run,
    "discard_run": discard_run,
}
