"""Builds trees of code from a cache of contents, and manages the folders of the cache.

A manifest is a list of ``[path, sha256, mode, size]``; paths are relative, ``/``-separated.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from pathlib import Path
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Optional, Tuple, Union

from ..supervision import processes
from . import safe_paths

Entry = List[Any]
Message = Dict[str, Any]
BLOCK_BYTES = 1 << 20
MAX_BYTES, MAX_TIME_US = 1 << 52, 1 << 52  # in answers: 4 PiB, and a time in the year 2112
MAX_RESULTS = 100_000  # files of a node that are fetched at once
MAX_AGE_S = 30 * 24 * 3600.0
MARK_FILE = ".paceline-run"  # in a run's folder: holds its key, and shows that it may be removed
UNCOLLECTED = ".uncollected"  # in a run's folder: files that had not been fetched at the end
UNCOLLECTED_SHARDS = ".uncollected-shards"  # the same of other ranks than 0: shards of checkpoints
SIGN_PREFIX = ".paceline-seen-"  # of a file by which an agent shows that it uses a folder
OWNER_FILE = ".paceline-agent"  # in a job's folder: names the agent that removes it
SOURCES_FILE = ".paceline-sources"  # in a run's folder: where rank 0's outputs are for now
SHARD_SOURCES_FILE = ".paceline-shard-sources"  # the same of other ranks
OWN_NAMES = (MARK_FILE, SOURCES_FILE, SHARD_SOURCES_FILE, safe_paths.INCOMING)
_KEY = re.compile("[0-9a-f]{24}")
_HASH = re.compile("[0-9a-f]{64}")
_JOB = re.compile("[0-9A-Za-z_-]{1,64}")


_cache_override: List[Path] = []


def use_cache(place: Path) -> None:
    """Uses ``place`` as the cache, if the usual one is not writable, or others can write to it."""
    _cache_override[:] = [place]


def cache_folder() -> Path:
    """Returns the folder of the cache: ``$XDG_CACHE_HOME/paceline``, or the one in use instead.

    Links to the home or to its ``.cache`` are resolved, as in the paths that processes print.
    """
    if _cache_override:
        return _cache_override[0]
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(os.path.realpath(base)) / "paceline"


def hash_file(path: "Union[str, Path]") -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    # faster than open() for the thousands of small files of every start
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while block := os.read(file, BLOCK_BYTES):
            digest.update(block)
    finally:
        os.close(file)
    return digest.hexdigest()


def compare(root: str, manifest: List[Entry]) -> Message:
    """Compares the tree at ``root`` with a manifest; returns missing and different paths."""
    missing, different = [], []
    for path, sha256, _, size in manifest:
        file = os.path.join(root, path)
        try:
            is_same = os.stat(file).st_size == size and hash_file(file) == sha256
        except OSError:
            missing.append(path)
            continue
        if not is_same:
            different.append(path)
    return {"exists": Path(root).is_dir(), "missing": missing, "different": different}


def missing_hashes(manifest: List[Entry]) -> List[str]:
    """Returns the hashes of a manifest whose content is not in the cache, each once."""
    sizes = {entry[1]: entry[3] for entry in manifest}
    return sorted(h for h, size in sizes.items() if not _is_cached(h, size))


def _is_cached(sha256: str, size: int) -> bool:
    with contextlib.suppress(OSError):
        return (cache_folder() / blob_path(sha256)).stat().st_size == size
    return False


def blob_path(sha256: str) -> str:
    """Returns the path of a content in the cache. ValueError for an invalid hash."""
    if not _HASH.fullmatch(sha256):
        raise ValueError("not a SHA-256: %r" % sha256[:100])
    return "blobs/%s/%s" % (sha256[:2], sha256)


# --- folders of runs ----------------------------------------------------------------------------


def is_key(text: str) -> bool:
    """Whether ``text`` has the form of a run's key."""
    return bool(_KEY.fullmatch(text))


def run_folder(key: str) -> Path:
    """Returns this node's own folder for a run. ValueError for an invalid key."""
    if not is_key(key):
        raise ValueError("not the key of a run: %r" % key[:100])
    return cache_folder() / "runs" / key


def make_run_folder(key: str, user: str = "") -> Path:
    """Returns the folder of the run under ``key``, created and marked if it is missing.

    ``user``: name of an agent that uses the folder; empty for none.
    """
    folder = _create_run_folder(key)
    if user:
        try:
            sign_folder(str(folder), user)
        except FileNotFoundError:  # another agent has just removed the folder
            return make_run_folder(key, user)
    return folder


def sign_folder(folder: str, user: str) -> None:
    """Writes the file by which an agent shows that it uses a run's folder."""
    os.close(safe_paths.open_file(folder, SIGN_PREFIX + user, os.O_WRONLY | os.O_CREAT))


def _create_run_folder(key: str) -> Path:
    folder = run_folder(key)
    safe_paths.make_folder(str(folder.parent))
    if not folder.is_symlink() and folder.is_dir():
        return folder
    unpublished = _private_folder(folder)
    try:
        (unpublished / MARK_FILE).write_text(key)
        _publish(unpublished, folder)  # the folder must never exist without its mark
    finally:
        shutil.rmtree(str(unpublished), ignore_errors=True)
    return folder


def _private_folder(folder: Path) -> Path:
    """Makes a uniquely named empty folder beside ``folder``: hosts and containers share disks."""
    name = ".new-%s-%d-%s" % (_pid_namespace(), os.getpid(), secrets.token_hex(8))
    private = folder.with_name(name)
    private.mkdir(mode=0o700)
    return private


def _publish(unpublished: Path, folder: Path) -> bool:
    """Renames the finished folder; False if another process was faster."""
    try:
        unpublished.rename(folder)
    except OSError as problem:
        if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _pid_namespace() -> str:
    """Returns eight digits for this boot's PID namespace, within which a process id is unique."""
    identifiers = []
    with contextlib.suppress(OSError):
        identifiers.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        identifiers.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("".join(identifiers).encode()).hexdigest()[:8] if identifiers else "0" * 8


def _is_abandoned(path: Path) -> bool:
    """Whether an agent was killed while it made or removed this folder."""
    if re.fullmatch(r"\.gone-[0-9a-f]{16}", path.name):
        return True
    match = re.fullmatch(r"\.new-([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{16}", path.name)
    if match is None or match[1] != _pid_namespace():
        return False
    return processes.read_stat(int(match[2])) is None


def discard_run_folder(key: str, only: "Optional[Collection[str]]" = None, user: str = "") -> bool:
    """Removes the marked folder of a run; returns whether it was removed.

    Args:
        key, user: Key of the run, and name of the agent that no longer uses the folder.
        only: Keep the folder if it holds any other files than these, or another agent uses it.
            A folder with files that had not been fetched at the end of a start is always kept.
    """
    folder = run_folder(key)
    if only is None and any((folder / name).exists() for name in (UNCOLLECTED, UNCOLLECTED_SHARDS)):
        only = ()  # so it holds other files
    if not _is_marked(folder, key):
        return False
    if user:
        with contextlib.suppress(OSError):
            (folder / (SIGN_PREFIX + user)).unlink()
    if only is not None and not {MARK_FILE, *only}.issuperset(os.listdir(str(folder))):
        return False
    remove_folder(folder)
    return True


def _is_marked(folder: Path, key: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        status, mark = folder.lstat(), (folder / MARK_FILE).lstat()
        is_ours = status.st_uid == mark.st_uid == os.getuid()
        is_regular = stat.S_ISDIR(status.st_mode) and stat.S_ISREG(mark.st_mode)
        return is_ours and is_regular and (folder / MARK_FILE).read_text() == key
    return False


def remove_folder(folder: Path) -> None:
    """Removes a folder of the cache, moved aside first so that its name never has part of it."""
    aside = folder.with_name(".gone-%s" % secrets.token_hex(8))
    with contextlib.suppress(OSError):
        folder.rename(aside)
        safe_paths.remove_tree(str(aside))


def job_folder(name: str) -> Path:
    """Returns a host's folder for the files of one job. ValueError for an invalid name."""
    if not _JOB.fullmatch(name):
        raise ValueError("not the name of a job's folder: %r" % name[:100])
    return cache_folder() / "jobs" / name


_AGENT_ID = secrets.token_hex(8)  # identifies this process among all that share the disk


def claim_job_folder(folder: Path) -> None:
    """Makes this agent the owner of a job's folder, which removes it at its end.

    An earlier agent of the host that has not ended yet then leaves the folder alone.
    """
    safe_paths.make_folder(str(folder))
    safe_paths.write_file(str(folder), OWNER_FILE, _AGENT_ID.encode(), durable=False)


def discard_job_folder(folder: Path) -> None:
    """Removes the folder if this agent is still its owner."""
    with contextlib.suppress(OSError):
        if (folder / OWNER_FILE).read_text() == _AGENT_ID:
            remove_folder(folder)


def remove_old(keep: str, max_age_s: float = MAX_AGE_S) -> None:
    """Removes cache entries unused for ``max_age_s``, and incomplete ones of killed agents.

    ``keep``: folder of this agent's own code.
    """
    cutoff = time.time() - max_age_s
    for name, is_ours in _CACHE_FOLDERS.items():
        folder = cache_folder() / name
        if folder.is_symlink():
            continue
        for path in folder.glob("*"):
            with contextlib.suppress(OSError):
                if path.is_symlink() or os.path.realpath(str(path)) == os.path.realpath(keep):
                    continue
                # is_ours reads the mark, which counts as use of the folder: so it comes last
                is_old = (_is_abandoned(path) or _last_used(path) < cutoff) and is_ours(path)
                if is_old and stat.S_ISDIR(path.lstat().st_mode):
                    remove_folder(path)
                elif is_old:
                    path.unlink()


def _has_name(form: str) -> Callable[[Path], bool]:
    """Makes a test for folders and files of this user with a name of this form."""

    def is_ours(path: Path) -> bool:
        status = path.lstat()
        is_regular = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
        return is_regular and status.st_uid == os.getuid() and bool(re.fullmatch(form, path.name))

    return is_ours


def _is_run(path: Path) -> bool:
    aside = _has_name(r"\.(gone|new-[0-9a-f]{8}-[0-9]{1,10})-[0-9a-f]{16}")(path)
    return aside or (is_key(path.name) and _is_marked(path, path.name))


# for each folder of the cache, which of its entries may be removed: users may add others
_CACHE_FOLDERS: Dict[str, Callable[[Path], bool]] = {
    "agent": _has_name(r"[0-9a-f]{8,64}(\.(new|old)[0-9a-f]+)?|\.gone-[0-9a-f]{16}"),
    "blobs": _has_name(r"[0-9a-f]{2}|\.gone-[0-9a-f]{16}"),
    "runs": _is_run,
    "jobs": _has_name(r"[0-9A-Za-z_-]{1,64}|\.gone-[0-9a-f]{16}"),
    safe_paths.INCOMING: _has_name("[0-9a-f]{16}"),
}


def _last_used(folder: Path) -> float:
    """Returns when any file of a folder was last changed or read."""
    times = [folder.lstat().st_mtime]
    for parent, folders, files in safe_paths.walk(str(folder)):
        for name in (*folders, *files):
            status = (folder / parent / name).lstat()
            times.append(max(status.st_mtime, status.st_atime))
    return max(times)


def build_tree(root: str, manifest: List[Entry], is_first: bool = True, is_last: bool = True,
                workdir: str = "") -> List[str]:  # fmt: skip
    """Builds the tree at ``root`` from the cache; it gets its name once it is complete.

    If several processes build the same tree, the last one's stays. A large manifest comes in parts,
    of which one ``is_first`` and one ``is_last``.

    Args:
        workdir: Relative path of a folder that the tree has even if no file is in it.

    Returns:
        Hashes of damaged cache entries, which were removed. If there are any, the missing contents
        and then the call must be repeated.
    """
    target = Path(root)
    if is_first:
        if root in _unfinished_trees:
            shutil.rmtree(str(_unfinished_trees.pop(root)), ignore_errors=True)
        safe_paths.make_folder(str(target.parent))
        _unfinished_trees[root] = _private_folder(target)
    if root not in _unfinished_trees:
        raise ValueError("the beginning of %s did not come" % root)
    unpublished = _unfinished_trees[root]
    with (
        safe_paths.FolderCache(str(cache_folder())) as cache,
        safe_paths.FolderCache(str(unpublished)) as tree,
    ):
        damaged = sorted({sha256 for path, sha256, mode, _ in manifest
                          if not _copy(cache, sha256, tree, path, mode)})  # fmt: skip
    if is_last and not damaged:
        os.close(safe_paths.open_folder(str(unpublished), workdir, make=True))
        del _unfinished_trees[root]
        for _ in range(MAX_RIVALS):
            if _publish(unpublished, target):
                return []
            remove_folder(target)
        shutil.rmtree(str(unpublished), ignore_errors=True)
        raise OSError(errno.EEXIST, "it cannot be replaced", root)
    return damaged


MAX_RIVALS = 100  # processes that publish the same tree at the same time
_unfinished_trees: Dict[str, Path] = {}  # by their final path, the trees that this process builds


def _copy(
    cache: safe_paths.FolderCache, sha256: str, tree: safe_paths.FolderCache, path: str, mode: int
) -> bool:
    """Copies a content from the cache into a tree; removes a damaged one and returns False."""
    blob = blob_path(sha256)
    target = tree.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        digest = _copy_content(cache, blob, target)
        os.fchmod(target, mode & 0o777)
    finally:
        os.close(target)
    if digest == sha256:
        return True
    if digest:
        cache.remove(blob)
    tree.remove(path)
    return False


def _copy_content(cache: safe_paths.FolderCache, blob: str, target: int) -> str:
    """Copies a content into an open file; returns its SHA-256, or "" if it has gone.

    If another host replaces the content meanwhile, a network disk may lose the file being read.
    """
    try:
        source = cache.open(blob, os.O_RDONLY)
        try:
            digest = hashlib.sha256()
            while data := os.read(source, BLOCK_BYTES):
                digest.update(data)
                safe_paths.write_fully(target, data)
            return digest.hexdigest()
        finally:
            os.close(source)
    except OSError as problem:
        if problem.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return ""


def store(contents: Iterable[Tuple[str, bytes]]) -> None:
    """Adds contents to the cache, each under its SHA-256.

    Raises ValueError if a content does not have its hash; the earlier ones were added.
    """
    root = cache_folder()
    safe_paths.make_folder(str(root))
    with safe_paths.FolderCache(str(root)) as cache:
        for sha256, data in contents:
            if hashlib.sha256(data).hexdigest() != sha256:
                raise ValueError("content does not have the hash %s" % sha256)
            if not _is_cached(sha256, len(data)):  # another agent of this disk may have been faster
                _store(cache, blob_path(sha256), data)


def _store(cache: safe_paths.FolderCache, path: str, data: bytes) -> None:
    part = secrets.token_hex(8)
    parent, _, name = path.rpartition("/")
    target = cache.descriptor(parent, make=True)
    file = cache.open("%s/%s" % (safe_paths.INCOMING, part), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    incoming = cache.descriptor(safe_paths.INCOMING)
    try:
        safe_paths.write_fully(file, data)
        os.replace(part, name, src_dir_fd=incoming, dst_dir_fd=target)
    except BaseException:
        os.unlink(part, dir_fd=incoming)
        raise
    finally:
        os.close(file)


def changed_files(root: str, manifest: Optional[List[Entry]]) -> List[Message]:
    """Returns files below ``root`` that differ from the manifest (``None``: all).

    Raises:
        ValueError: There are more than ``MAX_RESULTS`` of them.
    """
    known = {entry[0]: entry for entry in manifest or []}
    changes = []
    for path, size in _walk(Path(root)):
        entry = known.get(path)
        is_same = entry and entry[3] == size and hash_file(Path(root) / path) == entry[1]
        names = path.split("/")
        is_internal = names[0] in OWN_NAMES or names[0].startswith(SIGN_PREFIX)
        if not is_same and not is_internal and "__pycache__" not in names:
            changes.append({"path": path, "size": size})
            if len(changes) > MAX_RESULTS:
                raise ValueError(
                    "more than %d new files in %s: pack them, or copy them by hand"
                    % (MAX_RESULTS, root)
                )
    return changes


def _walk(root: Path) -> Iterator[Tuple[str, int]]:
    for folder, _, names in safe_paths.walk(str(root)):
        for name in sorted(names):
            path = root / folder / name
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    yield path.relative_to(root).as_posix(), path.stat().st_size
