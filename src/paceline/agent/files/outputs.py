"""Files that ranks write below the project: lists them, receives those of an earlier start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Tuple

from ..operations import in_queue, in_thread
from . import safe_paths, snapshot
from .blocks import RECEIVING

if TYPE_CHECKING:
    from ..operations import Agent

Message = Dict[str, Any]
INDEX = ".metadata"  # of torch.distributed.checkpoint: the only hidden file that is listed
SHARD_SUFFIX = ".distcp"  # of each rank's files beside it
SUPERSEDED = ".superseded"  # end of the name of a file that was set aside
_SUPERSEDED_NAME = re.compile(r"\..+%s(-[0-9]+)?" % re.escape(SUPERSEDED))
_MAX_SOURCES_BYTES = 64 << 10
SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages")
RUN_MARKS = (".paceline-key", ".paceline-probe", snapshot.MARK_FILE, "pyvenv.cfg")
MAX_HEADER_BYTES = 64 << 20
MAX_JSON_BYTES = 256 << 10  # of a file that is parsed
MAX_VERDICTS = 10_000
_CHECKPOINT_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")  # shards may be empty
_END_OF_ZIP, _END_OF_ZIP_BYTES, _ZIP_TAIL_BYTES = b"PK\5\6", 22, 1 << 10
_verdicts: Dict[str, Tuple[int, int, str]] = {}  # by path: size, time of change, result


def list_written(root: str, since_us: int) -> Tuple[List[Message], int]:
    """Lists regular files below ``root`` that changed at ``since_us`` or later.

    Also returns the time of the latest change of any file, on the clock of the disk. Times are in
    microseconds since 1970. A link to a file beside it counts as a file with that content, see
    :func:`safe_paths.resolve_link`. Hidden files, other links and folders of runs and packages are
    skipped.

    Raises:
        ValueError: There are more than ``MAX_RESULTS`` such files.
    """
    written: List[Message] = []
    latest_us, now = 0, time.time()
    for folder, folders, names in safe_paths.walk(root):
        path = os.path.join(root, folder)
        folders[:] = [name for name in folders if not _is_skipped(os.path.join(path, name), name)]
        for name in names:
            if name.startswith(".") and name != INDEX:
                continue
            file, relative = os.path.join(path, name), os.path.join(folder, name)
            if len(relative) > safe_paths.MAX_PATH_LENGTH or not relative.isprintable():
                continue
            with contextlib.suppress(OSError):
                status = link_status = os.lstat(file)
                if stat.S_ISLNK(status.st_mode):
                    file = os.path.join(root, safe_paths.resolve_link(root, relative))
                    status = os.lstat(file)
                if not stat.S_ISREG(status.st_mode):
                    continue
                # not st_mtime, which programs set to any time, also in the future
                changed_us = max(status.st_ctime_ns, link_status.st_ctime_ns) // 1000
                latest_us = max(latest_us, changed_us)
                if changed_us < since_us:
                    continue
                written.append({
                    "path": relative, "size": min(status.st_size, snapshot.MAX_BYTES),
                    "mtime_us": min(max(0, status.st_mtime_ns // 1000), snapshot.MAX_TIME_US),
                    "age_s": max(0.0, now - changed_us / 1e6), "state": _state(file, status),
                })  # fmt: skip
        if len(written) > snapshot.MAX_RESULTS:
            raise ValueError("more than %d new files in %s" % (snapshot.MAX_RESULTS, root))
    return written, latest_us


def _is_skipped(path: str, name: str) -> bool:
    if name.startswith(".") or name in SKIPPED_FOLDERS or os.path.islink(path):
        return True
    return any(os.path.lexists(os.path.join(path, mark)) for mark in RUN_MARKS)


def _state(path: str, status: os.stat_result) -> str:
    """Returns the state of a file's content, which is kept until the file changes."""
    version = status.st_size, status.st_mtime_ns
    if _verdicts.get(path, ())[:2] != version:
        if len(_verdicts) >= MAX_VERDICTS:
            _verdicts.clear()
        _verdicts[path] = (version[0], version[1], file_state(path, status.st_size))
    return _verdicts[path][2]


def file_state(path: str, size: int) -> str:
    """Returns whether a file of torch.save, safetensors, the Trainer or JSON has its end.

    ``whole`` if it has, ``cut off`` if it has not, ``unknown`` for all other formats.
    """
    if not size:
        return "cut off" if path.endswith(_CHECKPOINT_SUFFIXES) else "unknown"
    if path.endswith(".json") and not path.endswith("/trainer_state.json"):
        return "whole" if is_whole_json(path) else "unknown"
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if path.endswith("/trainer_state.json"):  # of the Trainer, which writes it last
            end = os.pread(fd, _ZIP_TAIL_BYTES, max(0, size - _ZIP_TAIL_BYTES))
            return "whole" if end.rstrip().endswith(b"}") else "cut off"
        head = os.read(fd, 8)
        if head.startswith(b"PK\3\4"):
            tail = os.pread(fd, _ZIP_TAIL_BYTES, max(0, size - _ZIP_TAIL_BYTES))
            end = tail[tail.rfind(_END_OF_ZIP) :] if _END_OF_ZIP in tail else b""
            return "whole" if len(end) >= _END_OF_ZIP_BYTES else "cut off"
        if path.endswith(".safetensors"):
            is_whole = len(head) == 8 and _has_all_tensors(fd, struct.unpack("<Q", head)[0], size)
            return "whole" if is_whole else "cut off"
        return "unknown"
    finally:
        os.close(fd)


def _has_all_tensors(fd: int, header_bytes: int, size: int) -> bool:
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        return False
    with contextlib.suppress(
        ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError
    ):
        header = json.loads(os.pread(fd, header_bytes, 8))
        ends = [entry["data_offsets"][1] for name, entry in header.items()
                if name != "__metadata__"]  # fmt: skip
        return 8 + header_bytes + max(ends, default=0) == size
    return False


def is_whole_json(path: str) -> bool:
    """Whether a small file is an object or a list in JSON, from its first byte to its last."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES or data.lstrip()[:1] not in (b"{", b"["):
        return False
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(data)
        return True
    return False


def superseded_path(root: str, path: str) -> str:
    """Returns a free hidden path beside a file or folder."""
    parent, _, name = path.rpartition("/")
    prefix = parent + "/" if parent else ""
    number = 1
    while True:
        end = SUPERSEDED if number == 1 else "%s-%d" % (SUPERSEDED, number)
        candidate = "%s.%s%s" % (prefix, name, end)
        if not os.path.lexists(os.path.join(root, candidate)):
            return candidate
        number += 1


def is_superseded(path: str) -> bool:
    """Whether a file, or a folder above it, was renamed to a name of :func:`superseded_path`."""
    return any(_SUPERSEDED_NAME.fullmatch(name) for name in path.split("/"))


def _job_root(agent: Agent, request: Message) -> str:
    """Returns the folder of the job's code, or the run's own; ValueError for any other."""
    root = str(request["root"])
    is_run_folder = any(root == str(snapshot.run_folder(key)) for key in agent.run_keys)
    if Path(root).parent not in agent.folders and not is_run_folder:
        raise ValueError("not a folder of this job: %r" % root[:100])
    return root


@in_thread
def list_outputs(agent: Agent, request: Message, _: bytes) -> None:
    """Answers files below ``root`` that changed at ``since_us`` or later."""
    root, since_us = request["root"], request["since_us"]
    files, latest_us = list_written(root, since_us)
    if Path(root).parent in agent.folders and since_us <= latest_us:
        agent.output_roots[root] = since_us
        # in the queue in which the folders are removed at the end
        agent.in_queue(RECEIVING, lambda: _record_sources(agent), {})
    agent.reply(request, files=files, latest_us=latest_us)


@in_thread
def hash_beginning(agent: Agent, request: Message, _: bytes) -> None:
    """Answers the SHA-256 of the first ``size`` bytes of ``path`` below the job's ``root``."""
    root = _job_root(agent, request)
    path = safe_paths.resolve_link(root, request["path"])
    fd = safe_paths.open_file(root, path, os.O_RDONLY)
    digest, rest = hashlib.sha256(), request["size"]
    with os.fdopen(fd, "rb") as file:
        while rest and (block := file.read(min(rest, snapshot.BLOCK_BYTES))):
            digest.update(block)
            rest -= len(block)
    agent.reply(request, sha256=digest.hexdigest())


def keep_uncollected(agent: Agent) -> None:
    """Puts outputs into the run's own folder, as the job's folders are removed.

    These are all outputs of rank 0, and shards of checkpoints that other ranks wrote. The next
    start of the run fetches them. Unless the launcher has said that it has fetched them, they may
    be the only ones: it was lost, or had no room.
    """
    for key in agent.run_keys:
        folder = snapshot.run_folder(key)
        if agent.job.ranks:
            _keep_written(folder, agent.output_roots, _uncollected_name(agent))
        for name in _SOURCES.values():
            with contextlib.suppress(OSError):
                (folder / name).unlink()
        with contextlib.suppress(OSError):  # which writing them has made
            (folder / safe_paths.INCOMING).rmdir()


_SOURCES = {
    snapshot.UNCOLLECTED: snapshot.SOURCES_FILE,
    snapshot.UNCOLLECTED_SHARDS: snapshot.SHARD_SOURCES_FILE,
}


def _uncollected_name(agent: Agent) -> str:
    """Returns the folder, in a run's own, in which outputs of an agent's ranks are kept."""
    has_first = any(rank.rank == 0 for rank in agent.job.ranks)
    return snapshot.UNCOLLECTED if has_first else snapshot.UNCOLLECTED_SHARDS


def _record_sources(agent: Agent) -> None:
    """Writes where the outputs are, in case the host is switched off before its agent ends."""
    if not agent.job.ranks:
        return
    sources, name = json.dumps(agent.output_roots).encode(), _SOURCES[_uncollected_name(agent)]
    for key in agent.run_keys:
        folder = snapshot.run_folder(key)
        with contextlib.suppress(OSError):
            path = folder / name
            if not path.exists() or path.read_bytes() != sources:
                safe_paths.write_file(str(folder), name, sources)


def keep_abandoned(folder: Path) -> None:
    """Does what :func:`keep_uncollected` would have done in an agent that could not end itself."""
    jobs = snapshot.cache_folder() / "jobs"
    for folder_name, name in _SOURCES.items():
        with contextlib.suppress(OSError, ValueError):
            fd = safe_paths.open_file(str(folder), name, os.O_RDONLY)
            with os.fdopen(fd, "rb") as file:
                sources = json.loads(file.read(_MAX_SOURCES_BYTES))
            if isinstance(sources, dict):
                roots = {root: since_us for root, since_us in sources.items()
                         if Path(root).parent.parent == jobs
                         and isinstance(since_us, int)}  # fmt: skip
                _keep_written(folder, roots, folder_name)
            (folder / name).unlink()


def _keep_written(folder: Path, roots: Dict[str, int], folder_name: str) -> None:
    target = folder / folder_name
    for root, since_us in roots.items():
        for file in list_written(root, since_us + 1)[0]:
            is_shard = file["path"].endswith(SHARD_SUFFIX)
            if folder_name == snapshot.UNCOLLECTED_SHARDS and not is_shard:
                continue
            with contextlib.suppress(OSError):
                safe_paths.make_folder(str((target / file["path"]).parent))
                _link(os.path.join(root, file["path"]), str(target / file["path"]))


def _link(source: str, target: str) -> None:
    """Gives a file a second name, as a warm agent keeps the job's folder; else moves it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    try:
        os.link(source, target)
    except OSError:  # a disk without hard links
        os.replace(source, target)


def forget_outputs(agent: Agent, request: Message, _: bytes) -> None:
    """Lets outputs be removed with the job's folders: the launcher has fetched them."""
    agent.output_roots.clear()
    agent.reply(request)


@in_queue(RECEIVING)
def discard_uncollected(agent: Agent, request: Message, _: bytes) -> None:
    """Removes what an earlier agent kept in the run folder ``root``: rank 0's files, or shards."""
    folder_name = snapshot.UNCOLLECTED_SHARDS if request["shards"] else snapshot.UNCOLLECTED
    safe_paths.remove_tree(os.path.join(_job_root(agent, request), folder_name))
    agent.reply(request)


@in_queue(RECEIVING)
def set_outputs_aside(agent: Agent, request: Message, _: bytes) -> None:
    """Renames ``paths`` below the job's ``root``, so that no script takes them for checkpoints.

    Those in ``discarded``, which the launcher has, are removed instead.
    """
    root = _job_root(agent, request)
    with safe_paths.FolderCache(root) as folders:
        for path in request["discarded"]:
            folders.remove(path)
    for path in request["paths"]:
        with contextlib.suppress(FileNotFoundError):
            safe_paths.rename(root, path, superseded_path(root, path), durable=False)
    agent.reply(request)


@in_queue(RECEIVING)
def put_output(agent: Agent, request: Message, blob: bytes) -> None:
    """Receives a block of ``path`` below the job's ``root``, last changed at ``mtime_us``."""
    root = _job_root(agent, request)
    agent.uploads.receive(root, request["path"], request, blob, durable=False)
    if request["last"]:
        fd = safe_paths.open_file(root, request["path"], os.O_RDONLY)
        try:
            os.utime(fd, ns=(request["mtime_us"] * 1000, request["mtime_us"] * 1000))
        finally:
            os.close(fd)
    agent.reply(request)


OPERATIONS: "Dict[str, Callable[[Agent, Message, bytes], None]]" = {
    "list_outputs": list_outputs,
    "hash_beginning": hash_beginning,
    "forget_outputs": forget_outputs,
    "discard_uncollected": discard_uncollected,
    "set_outputs_aside": set_outputs_aside,
    "put_output": put_output,
}
