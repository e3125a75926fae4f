"""Lists folders of data, and keeps copies of the launcher's folders in this node's cache.

A copy is in ``data/KEY/files/NAME`` and outlives the agent, so that only changes are sent. An item
is ``[path, size, mtime]``, the time in microseconds. A file of a copy has its original's time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from . import safe_paths, snapshot

Message = Dict[str, Any]
_Ancestors = Tuple[Tuple[int, int], ...]
Item = List[Any]
ARRIVING = "arriving"  # folder in a copy's: incomplete files, which a later run continues
ABANDONED_AFTER_S = 120.0  # without a change, after which a file's writer counts as killed
USED = "used"  # file in a copy's folder that agents lock while they use the copy
SIGN_PREFIX = "seen-"  # of a file in a copy's folder by which an agent shows that it sees the disk
PAGE_ITEMS = 2000  # items in a reply
MAX_DEPTH = 2 * safe_paths.MAX_DEPTH  # as for code: see transfer/tree.py
MAX_LINKS = 1000  # visits of one folder through links
MAX_FINGERPRINTS = 1000  # entries of a folder that are part of its fingerprint


def copy_folder(key: str) -> Path:
    """Returns the folder of the copy ``key``. ValueError for an invalid key."""
    if not snapshot.is_key(key):
        raise ValueError("not the key of data: %r" % key[:100])
    return snapshot.cache_folder() / "data" / key


def inner(name: str, path: str = "") -> str:
    """Returns the path of a copy's file relative to the copy's folder."""
    (name,) = safe_paths.split_path(name)
    return "files/%s/%s" % (name, path) if path else "files/%s" % name


def fingerprints(path: str) -> List[str]:
    """Returns inode and times of a folder and its entries; equal only for the same folder.

    The list is empty if there is no folder.
    """
    try:
        names = sorted(os.listdir(path))[:MAX_FINGERPRINTS]
        stats = [os.stat(path)]
    except OSError:
        return []
    for name in names:
        with contextlib.suppress(OSError):
            stats.append(os.lstat(os.path.join(path, name)))
    return ["%d %d %d" % (s.st_ino, s.st_ctime_ns, s.st_mtime_ns) for s in stats]


def walk(root: str) -> Iterator[Item]:
    """Yields the items of all files, links followed, in the order of :func:`sort_key`.

    Raises OSError if the tree is nested too deeply, or too many links lead to one folder.
    """
    waiting = [("", (), False)] if os.path.isdir(root) else []  # type: List[Tuple[str, _Ancestors, bool]]
    num_visits = {}  # type: Dict[Tuple[int, int], int]
    while waiting:
        parent, ancestors, through_link = waiting.pop()
        if len(ancestors) > MAX_DEPTH:
            message = "folders are nested more than %d deep" % MAX_DEPTH
            raise OSError(errno.ENAMETOOLONG, message, os.path.join(root, parent)[:200])
        status = os.stat(os.path.join(root, parent))
        identity = (status.st_dev, status.st_ino)
        if identity in ancestors:  # a link to a folder above
            continue
        if through_link:
            num_visits[identity] = num_visits.get(identity, 0) + 1
            if num_visits[identity] > MAX_LINKS:
                message = "more than %d ways through links lead to one folder" % MAX_LINKS
                raise OSError(errno.ELOOP, message, os.path.join(root, parent)[:200])
        with os.scandir(os.path.join(root, parent)) as iterator:
            entries = sorted(iterator, key=lambda entry: entry.name)
        folders = []
        for entry in entries:
            if entry.is_dir():
                linked = through_link or entry.is_symlink()
                folders.append(("%s%s/" % (parent, entry.name), (*ancestors, identity), linked))
            elif entry.is_file():
                status = entry.stat()
                mtime_us = min(status.st_mtime_ns // 1000, snapshot.MAX_TIME_US)
                yield [parent + entry.name, min(status.st_size, snapshot.MAX_BYTES), mtime_us]
        waiting += reversed(folders)


def sort_key(path: str) -> List[Tuple[int, str]]:
    """Returns a key that sorts a folder's files before the content of its folders."""
    *parents, name = path.split("/")
    return [(1, folder) for folder in parents] + [(0, name)]


def hashes(root: str, paths: Sequence[str]) -> List[str]:
    """Returns the SHA-256 of each file; empty for a file that cannot be read."""
    digests = []
    for path in paths:
        safe_paths.split_path(path)
        try:
            digests.append(snapshot.hash_file(Path(root) / path))
        except OSError:
            digests.append("")
    return digests


def remove_old(max_age_s: float = snapshot.MAX_AGE_S) -> None:
    """Removes copies that were not used for ``max_age_s``."""
    for folder in (snapshot.cache_folder() / "data").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if copy_folder(folder.name).lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            if time.time() - (folder / USED).stat().st_mtime > max_age_s and not _is_in_use(folder):
                snapshot.remove_folder(folder)


def _is_in_use(folder: Path) -> bool:
    with open(str(folder / USED), "rb+") as file:  # NFS locks only what is open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class DataCopies:
    """Holds the copies that this agent's job uses, and writes files that arrive for them."""

    def __init__(self, identity: str) -> None:
        self._sign_file = SIGN_PREFIX + identity
        self._lock_fds: Dict[str, int] = {}
        self._listings: Dict[str, Iterator[Item]] = {}
        self._open: Dict[Tuple[str, str], _PartialFile] = {}

    def open_copy(self, key: str, name: str) -> Path:
        """Returns the copy's folder, which need not exist; protects it while this agent lives."""
        place = copy_folder(key)
        if key not in self._lock_fds:
            safe_paths.make_folder(str(place))
            for file_name in (USED, self._sign_file):
                os.close(safe_paths.open_file(str(place), file_name, os.O_WRONLY | os.O_CREAT))
            used = os.open(str(place / USED), os.O_RDWR)
            os.utime(used)
            with contextlib.suppress(OSError):  # a disk without locks
                fcntl.flock(used, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._lock_fds[key] = used
        return place / inner(name)

    def touch(self) -> None:
        """Marks the copies as used, for disks without locks."""
        for used in [*self._lock_fds.values()]:
            os.utime(used)

    def next_page(self, root: str, first: bool) -> Tuple[List[Item], bool]:
        """Returns the next items below ``root``, and whether they are the last."""
        if first or root not in self._listings:
            self._listings[root] = walk(root)
        items = []
        for item in self._listings[root]:
            items.append(item)
            if len(items) == PAGE_ITEMS:
                return items, False
        del self._listings[root]
        return items, True

    def update(
        self, key: str, name: str, removed: Sequence[str], unchanged: Sequence[Item]
    ) -> None:
        """Removes files of a copy, and gives unchanged files the times of their originals."""
        with safe_paths.FolderCache(str(copy_folder(key))) as copy:
            for path in removed:
                copy.remove(inner(name, path))
            for path, _, mtime in unchanged:
                file = copy.open(inner(name, path), os.O_RDONLY)
                try:
                    os.utime(file, ns=(mtime * 1000, mtime * 1000))
                finally:
                    os.close(file)
        root = str(copy_folder(key) / inner(name))
        for parent in sorted({path.rpartition("/")[0] for path in removed} - {""}, reverse=True):
            with contextlib.suppress(OSError):  # not empty
                os.removedirs(os.path.join(root, parent))

    def write_many(self, key: str, name: str, items: Sequence[Item], data: bytes) -> None:
        """Adds small files, whose contents are concatenated in ``data``."""
        at = 0
        with safe_paths.FolderCache(str(copy_folder(key))) as copy:
            for path, size, mtime in items:
                _add(copy, inner(name, path), data[at : at + size], mtime)
                at += size

    def resume(self, key: str, name: str, path: str) -> Tuple[int, str]:
        """Returns size and SHA-256 of the part of a large file that arrived earlier."""
        growing = _PartialFile(key, inner(name, path))
        self._open[key, path] = growing
        return growing.size, growing.digest.hexdigest()

    def write_block(self, key: str, name: str, path: str, request: Message, data: bytes) -> None:
        """Appends a block of a large file; renames it after the last one.

        ``request`` has ``offset`` and ``last``; for the last block also ``sha256`` and ``mtime``.
        Raises ValueError if the block is not the next one, or the file's hash differs.
        """
        growing = self._open.pop((key, path), None) or _PartialFile(key, inner(name, path))
        try:
            growing.add(request["offset"], data)
            if request["last"]:
                growing.finish(request["sha256"], request["mtime"])
            else:
                self._open[key, path] = growing
        except BaseException:
            growing.close()
            raise

    def close(self) -> None:
        """Releases the copies; incomplete files stay for a later agent."""
        for growing in self._open.values():
            growing.close()
        self._open = {}
        for key, used in self._lock_fds.items():
            os.close(used)
            with contextlib.suppress(OSError):
                (copy_folder(key) / self._sign_file).unlink()
        self._lock_fds = {}


def _add(copy: safe_paths.FolderCache, path: str, data: bytes, mtime: int) -> None:
    # not flushed: sizes and times are compared before each run, also after a power cut
    part = secrets.token_hex(8)
    parent, _, name = path.rpartition("/")
    file = copy.open("%s/%s" % (ARRIVING, part), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        safe_paths.write_fully(file, data)
        os.utime(file, ns=(mtime * 1000, mtime * 1000))
    finally:
        os.close(file)
    target = copy.descriptor(parent, make=True)
    os.replace(part, name, src_dir_fd=copy.descriptor(ARRIVING), dst_dir_fd=target)


class _PartialFile:
    """A file that arrives in blocks; it continues what an earlier agent has received.

    It has a name of its own until it is complete: agents of other hosts may use the same disk,
    where locks may be valid for one host only.
    """

    def __init__(self, key: str, path: str) -> None:
        self._root, self._path = str(copy_folder(key)), path
        name = hashlib.sha256(path.encode(errors="replace")).hexdigest()
        self._abandoned_path = "%s/%s" % (ARRIVING, name)
        self._part_path = "%s-%s" % (self._abandoned_path, secrets.token_hex(8))
        self._file: Optional[int] = _open_locked(self._root, self._part_path)
        self._adopt_abandoned(name)
        self.digest = hashlib.sha256()
        self.size = 0
        while data := os.read(self._file, snapshot.BLOCK_BYTES):
            self.digest.update(data)
            self.size += len(data)

    def _adopt_abandoned(self, name: str) -> None:
        """Continues an incomplete file that an earlier agent has left, if there is one."""
        assert self._file is not None
        now = os.fstat(self._file).st_mtime  # by the disk's own clock
        for abandoned in sorted(os.listdir(os.path.join(self._root, ARRIVING))):
            path = "%s/%s" % (ARRIVING, abandoned)
            if not abandoned.startswith(name) or path == self._part_path:
                continue
            with contextlib.suppress(OSError):  # it is in use, or another agent was faster
                if path == self._abandoned_path or self._is_abandoned(path, now):
                    # a new name, because SMB does not replace open files
                    adopted = "%s-%s" % (self._abandoned_path, secrets.token_hex(8))
                    safe_paths.rename(self._root, path, adopted, durable=False)
                    os.close(self._file)
                    os.unlink(os.path.join(self._root, self._part_path))
                    self._part_path, self._file = adopted, _open_locked(self._root, adopted)
                    return

    def _is_abandoned(self, path: str, now: float) -> bool:
        file = _open_locked(self._root, path, os.O_RDWR)
        try:
            return now - os.fstat(file).st_mtime > ABANDONED_AFTER_S
        finally:
            os.close(file)

    def add(self, offset: int, data: bytes) -> None:
        assert self._file is not None
        if offset == 0 and self.size:  # the part that was here is of another file
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            self.digest, self.size = hashlib.sha256(), 0
        if offset != self.size:
            raise ValueError("a block at byte %d came where %d was next" % (offset, self.size))
        safe_paths.write_fully(self._file, data)
        self.digest.update(data)
        self.size += len(data)

    def finish(self, sha256: str, mtime: int) -> None:
        assert self._file is not None
        if self.digest.hexdigest() != sha256:
            self.size = 0
            raise ValueError("content does not have the hash %s" % sha256)
        os.utime(self._file, ns=(mtime * 1000, mtime * 1000))
        safe_paths.rename(self._root, self._part_path, self._path, durable=False)
        self._part_path = ""
        self.close()

    def close(self) -> None:
        """Closes the file; an incomplete one is left for a later agent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            part = self._part_path
            with contextlib.suppress(OSError):
                if part and self.size:
                    safe_paths.rename(self._root, part, self._abandoned_path, durable=False)
                elif part:
                    os.unlink(os.path.join(self._root, part))


def _open_locked(root: str, path: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Opens and locks a file, if the disk has locks. OSError if another process has the lock."""
    file = safe_paths.open_file(root, path, flags)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError:
        pass
    return file
