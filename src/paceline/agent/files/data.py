"""Folders of data: what is in them, and the copies of the launcher's folders that a node keeps.

A copy has a key; it lies in ``data/KEY/files/NAME`` of the cache and outlives the agent, so that
only what has changed is sent the next time. An item is ``[path, size, mtime]``, the last in
nanoseconds; a copied file has the time of its original. What a launcher can ask about them stands
at the end, as :data:`OPERATIONS`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from . import safe_paths, snapshot, transfer

if TYPE_CHECKING:
    from ..server import Agent

Message = Dict[str, Any]
_Passed = Tuple[Tuple[int, int], ...]
Item = List[Any]
ARRIVING = "arriving"  # below a copy's key: what has not come as a whole; a later run goes on
ABANDONED_S = 120.0  # without a change: the agent that wrote it was killed
USED = "used"  # below it: an agent that uses the copy has it locked
SIGN = "seen-"  # below it: begins the name of a file that shows who sees this disk
PAGE = 2000  # items in an answer
LISTING = "listing"  # a line of work: see Agent.in_line
MOST_DEPTH = 2 * safe_paths.MOST_DEPTH  # as of the code: see transfer/tree.py
MOST_WAYS = 1000  # that lead through links to one folder
MARKED = 1000  # entries of a folder that tell whether it is the same one


def home(key: str) -> Path:
    """Where the copy ``key`` is kept. ValueError for what is no key."""
    if not snapshot.is_key(key):
        raise ValueError("not the key of data: %r" % key[:100])
    return snapshot.cache_folder() / "data" / key


def inner(name: str, path: str = "") -> str:
    """A path of a copy below its key."""
    (name,) = safe_paths.parts_of(name)
    return "files/%s/%s" % (name, path) if path else "files/%s" % name


def marks(path: str) -> List[str]:
    """What two looks at one folder have in common, and no two folders; nothing where none is."""
    try:
        names = sorted(os.listdir(path))[:MARKED]
        looks = [os.stat(path)]
    except OSError:
        return []
    for name in names:
        with contextlib.suppress(OSError):
            looks.append(os.lstat(os.path.join(path, name)))
    return ["%d %d %d" % (one.st_ino, one.st_ctime_ns, one.st_mtime_ns) for one in looks]


def walk(root: str) -> Iterator[Item]:
    """Items of all files, through links, in the order of :func:`order`; none without a folder.

    OSError for folders with links from each to the next, which few bytes make endless.
    """
    waiting = [("", (), False)] if os.path.isdir(root) else []  # type: List[Tuple[str, _Passed, bool]]
    ways = {}  # type: Dict[Tuple[int, int], int]
    while waiting:
        above, passed, through_link = waiting.pop()
        if len(passed) > MOST_DEPTH:
            words = "folders are nested more than %d deep" % MOST_DEPTH
            raise OSError(errno.ENAMETOOLONG, words, os.path.join(root, above)[:200])
        about = os.stat(os.path.join(root, above))
        here = (about.st_dev, about.st_ino)
        if here in passed:  # a link to a folder above
            continue
        if through_link:
            ways[here] = ways.get(here, 0) + 1
            if ways[here] > MOST_WAYS:
                words = "more than %d ways through links lead to one folder" % MOST_WAYS
                raise OSError(errno.ELOOP, words, os.path.join(root, above)[:200])
        with os.scandir(os.path.join(root, above)) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        folders = []
        for entry in entries:
            if entry.is_dir():
                linked = through_link or entry.is_symlink()
                folders.append(("%s%s/" % (above, entry.name), (*passed, here), linked))
            elif entry.is_file():
                about = entry.stat()
                yield [above + entry.name, about.st_size, about.st_mtime_ns // 1000]
        waiting += reversed(folders)


def order(path: str) -> List[Tuple[int, str]]:
    """By this the items of a folder are sorted: its files, then what is in its folders."""
    *above, name = path.split("/")
    return [(1, one) for one in above] + [(0, name)]


def hashes(root: str, paths: Sequence[str]) -> List[str]:
    """SHA-256 of each file; empty for one that cannot be read."""
    found = []
    for path in paths:
        safe_paths.parts_of(path)
        try:
            found.append(snapshot.hash_file(Path(root) / path))
        except OSError:
            found.append("")
    return found


def forget_old(max_age_s: float = snapshot.KEPT_S) -> None:
    """Removes copies that nobody has used for a month."""
    for folder in (snapshot.cache_folder() / "data").glob("*"):
        with contextlib.suppress(OSError, ValueError):
            if home(folder.name).lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            if time.time() - (folder / USED).stat().st_mtime > max_age_s and not _in_use(folder):
                snapshot.remove_tree(folder)


def _in_use(folder: Path) -> bool:
    with open(str(folder / USED), "rb+") as file:  # NFS locks only what is open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class Copies:
    """The copies that this agent's job uses, and what is under way to them.

    Args:
        identity: Names this agent.
    """

    def __init__(self, identity: str) -> None:
        self._sign = SIGN + identity
        self._used: Dict[str, int] = {}
        self._listed: Dict[str, Iterator[Item]] = {}
        self._open: Dict[Tuple[str, str], _Growing] = {}

    def begin(self, key: str, name: str) -> Path:
        """The copy's folder, made or not; it is kept from now on, as long as this agent lives."""
        place = home(key)
        if key not in self._used:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            for kept in (USED, self._sign):
                os.close(safe_paths.open_file(str(place), kept, os.O_WRONLY | os.O_CREAT))
            used = os.open(str(place / USED), os.O_RDWR)
            os.utime(used)
            with contextlib.suppress(OSError):  # a disk without locks
                fcntl.flock(used, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._used[key] = used
        return place / inner(name)

    def touch(self) -> None:
        """Shows that the copies are still used, where locks do not tell."""
        for used in [*self._used.values()]:
            os.utime(used)

    def page(self, root: str, first: bool) -> Tuple[List[Item], bool]:
        """The next items below ``root``, and whether these were the last."""
        if first or root not in self._listed:
            self._listed[root] = walk(root)
        items = []
        for item in self._listed[root]:
            items.append(item)
            if len(items) == PAGE:
                return items, False
        del self._listed[root]
        return items, True

    def settle(self, key: str, name: str, gone: Sequence[str], same: Sequence[Item]) -> None:
        """Removes ``gone`` from a copy, and gives ``same`` the times of their originals."""
        with safe_paths.Folders(str(home(key))) as copy:
            for path in gone:
                copy.remove(inner(name, path))
            for path, _, mtime in same:
                file = copy.open(inner(name, path), os.O_RDONLY)
                try:
                    os.utime(file, ns=(mtime * 1000, mtime * 1000))
                finally:
                    os.close(file)
        root = str(home(key) / inner(name))
        for above in sorted({path.rpartition("/")[0] for path in gone} - {""}, reverse=True):
            with contextlib.suppress(OSError):  # not empty
                os.removedirs(os.path.join(root, above))

    def put_many(self, key: str, name: str, items: Sequence[Item], data: bytes) -> None:
        """Adds small files, one after the other in ``data``."""
        at = 0
        with safe_paths.Folders(str(home(key))) as copy:
            for path, size, mtime in items:
                _add(copy, inner(name, path), data[at : at + size], mtime)
                at += size

    def have(self, key: str, name: str, path: str) -> Tuple[int, str]:
        """How many bytes of a large file are here from an earlier try, and their SHA-256."""
        growing = _Growing(key, inner(name, path))
        self._open[key, path] = growing
        return growing.size, growing.digest.hexdigest()

    def put(self, key: str, name: str, path: str, request: Message, data: bytes) -> None:
        """The next block of a large file; after the last one it is there.

        Args:
            key, name, path: Which file.
            request: ``offset``, ``last``; with the last ``sha256`` and ``mtime``.
            data: The block.

        Raises:
            ValueError: The file is not what was announced.
        """
        growing = self._open.pop((key, path), None) or _Growing(key, inner(name, path))
        try:
            growing.add(request["offset"], data)
            if request["last"]:
                growing.finish(request["sha256"], request["mtime"])
            else:
                self._open[key, path] = growing
        except BaseException:
            growing.close()
            raise

    def drop(self) -> None:
        """Lets go of everything; what has come stays."""
        for growing in self._open.values():
            growing.close()
        self._open = {}
        for key, used in self._used.items():
            os.close(used)
            with contextlib.suppress(OSError):
                os.unlink(str(home(key) / self._sign))
        self._used = {}


def _add(copy: safe_paths.Folders, path: str, data: bytes, mtime: int) -> None:
    # not flushed: after a power cut the sizes and times are compared, as always
    part = secrets.token_hex(8)
    above, _, name = path.rpartition("/")
    file = copy.open("%s/%s" % (ARRIVING, part), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        safe_paths.write_all(file, data)
        os.utime(file, ns=(mtime * 1000, mtime * 1000))
    finally:
        os.close(file)
    target = copy.descriptor(above, make=True)
    os.replace(part, name, src_dir_fd=copy.descriptor(ARRIVING), dst_dir_fd=target)


class _Growing:
    """A file that comes in blocks, and goes on where an earlier agent was cut off.

    It grows under a name of this agent's own: others may have the same disk, whose locks may hold
    for one host only.
    """

    def __init__(self, key: str, path: str) -> None:
        self._root, self._path = str(home(key)), path
        name = hashlib.sha256(path.encode(errors="replace")).hexdigest()
        self._left = "%s/%s" % (ARRIVING, name)
        self._part = "%s-%s" % (self._left, secrets.token_hex(8))
        self._file: Optional[int] = _locked(self._root, self._part)
        self._take_over(name)
        self.digest = hashlib.sha256()
        self.size = 0
        while data := os.read(self._file, snapshot.BLOCK):
            self.digest.update(data)
            self.size += len(data)

    def _take_over(self, name: str) -> None:
        """Goes on with what an earlier agent has left, or was killed over, if it is there."""
        assert self._file is not None
        now = os.fstat(self._file).st_mtime  # by the disk's own clock
        for left in sorted(os.listdir(os.path.join(self._root, ARRIVING))):
            path = "%s/%s" % (ARRIVING, left)
            if not left.startswith(name) or path == self._part:
                continue
            with contextlib.suppress(OSError):  # in use, or another agent was faster
                if path == self._left or self._is_abandoned(path, now):
                    # under a new name: SMB replaces no file that somebody has open
                    taken = "%s-%s" % (self._left, secrets.token_hex(8))
                    safe_paths.rename(self._root, path, taken, durable=False)
                    os.close(self._file)
                    os.unlink(os.path.join(self._root, self._part))
                    self._part, self._file = taken, _locked(self._root, taken)
                    return

    def _is_abandoned(self, path: str, now: float) -> bool:
        file = _locked(self._root, path, os.O_RDWR)
        try:
            return now - os.fstat(file).st_mtime > ABANDONED_S
        finally:
            os.close(file)

    def add(self, offset: int, data: bytes) -> None:
        assert self._file is not None
        if offset == 0 and self.size:  # what was here is of another file
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            self.digest, self.size = hashlib.sha256(), 0
        if offset != self.size:
            raise ValueError("a block at byte %d came where %d was next" % (offset, self.size))
        safe_paths.write_all(self._file, data)
        self.digest.update(data)
        self.size += len(data)

    def finish(self, sha256: str, mtime: int) -> None:
        assert self._file is not None
        if self.digest.hexdigest() != sha256:
            self.size = 0
            raise ValueError("content does not have the hash %s" % sha256)
        os.utime(self._file, ns=(mtime * 1000, mtime * 1000))
        safe_paths.rename(self._root, self._part, self._path, durable=False)
        self._part = ""
        self.close()

    def close(self) -> None:
        """Lets go of it; what has come is left for a later agent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(OSError):
                if self._part and self.size:
                    safe_paths.rename(self._root, self._part, self._left, durable=False)
                elif self._part:
                    os.unlink(os.path.join(self._root, self._part))


def _locked(root: str, path: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Opens a file and takes its lock; a disk may have none. OSError where another one holds it."""
    file = safe_paths.open_file(root, path, flags)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError:
        pass
    return file


# --- operations: what a launcher can ask about copies of data ------------------------------------


def data_folder(agent: Agent, request: Message, _: bytes) -> None:
    """What is at ``path`` here, and where the copy ``key`` of it is: ``name`` is its last part."""

    def work() -> None:
        folder = agent.data_copies.begin(request["key"], request["name"])
        place = home(request["key"])
        agent.reply(
            request,
            marks=marks(request["path"]),
            folder=str(folder),
            sign=str(place / (SIGN + agent.identity.hex())),
            free=shutil.disk_usage(str(place)).free,
        )

    agent.in_thread(work, request)


def list_data(agent: Agent, request: Message, _: bytes) -> None:
    """The next items below ``root``, from the ``first`` on."""

    def work() -> None:
        files, last = agent.data_copies.page(request["root"], request["first"])
        agent.reply(request, files=files, last=last)

    agent.in_queue(LISTING, work, request)


def hash_data(agent: Agent, request: Message, _: bytes) -> None:
    agent.in_thread(
        lambda: agent.reply(request, hashes=hashes(request["root"], request["paths"])), request
    )


def settle_data(agent: Agent, request: Message, _: bytes) -> None:
    """Removes the files ``gone`` from a copy; those of ``same`` get their originals' times."""

    def work() -> None:
        agent.data_copies.settle(request["key"], request["name"], request["gone"], request["same"])
        agent.reply(request)

    agent.in_queue(transfer.ARRIVING, work, request)


def put_data_files(agent: Agent, request: Message, blob: bytes) -> None:
    """Small files of a copy: their ``items``, and their contents one after the other."""

    def work() -> None:
        agent.data_copies.put_many(request["key"], request["name"], request["items"], blob)
        agent.reply(request)

    agent.in_queue(transfer.ARRIVING, work, request)


def have_data(agent: Agent, request: Message, _: bytes) -> None:
    """How much of a copy's file ``path`` an earlier try has left."""

    def work() -> None:
        size, sha256 = agent.data_copies.have(request["key"], request["name"], request["path"])
        agent.reply(request, size=size, sha256=sha256)

    agent.in_queue(transfer.ARRIVING, work, request)


def put_data(agent: Agent, request: Message, blob: bytes) -> None:
    """The next block of a copy's file ``path``."""

    def work() -> None:
        agent.data_copies.put(request["key"], request["name"], request["path"], request, blob)
        agent.reply(request)

    agent.in_queue(transfer.ARRIVING, work, request)


OPERATIONS: "Dict[str, Callable[[Agent, Message, bytes], None]]" = {
    "data_folder": data_folder,
    "list_data": list_data,
    "hash_data": hash_data,
    "settle_data": settle_data,
    "put_data_files": put_data_files,
    "have_data": have_data,
    "put_data": put_data,
}
