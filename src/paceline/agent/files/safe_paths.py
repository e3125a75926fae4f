"""Files below a folder of ours: no name leads out of it, and no link inside it is followed.

The folder itself may be reached through links: it is what the user named. Used on nodes for the
cache, and on the launching machine for the run directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
import unicodedata
from typing import Dict, Iterator, List, Tuple

INCOMING = ".paceline-incoming"  # below the folder: what has not come as a whole yet
MOST_CHARACTERS = 4096
MOST_DEPTH = 64  # names on the path of a file that comes from another machine
MOST_BYTES = 255  # of one name: what file systems take
READERS_S = 2.0


def folded(name: str) -> str:
    """A name as a file system may compare it: without case and without invisible characters."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    return "".join(one for one in plain if unicodedata.category(one) != "Cf")


def why_refused(path: str) -> str:
    """Why a file that another machine or a rank names is not made here; empty if it may be.

    Git runs programs that a repository's configuration names. Every repository has a file HEAD,
    also one without ``.git`` (a bare one).
    """
    try:
        parts = parts_of(path)
    except ValueError as problem:
        return str(problem)
    if len(parts) > MOST_DEPTH:
        return "more than %d folders deep" % MOST_DEPTH
    try:
        if any(len(os.fsencode(part)) > MOST_BYTES for part in parts):
            return "a name of more than %d bytes" % MOST_BYTES
    except UnicodeEncodeError:
        return "a name that no file can have"
    if any(unicodedata.category(one) in ("Cc", "Zl", "Zp") for one in path):
        return "a control character in its name"
    if any(folded(part).rstrip(". ") == ".git" for part in parts) or folded(parts[-1]) == "head":
        return "part of a git repository"
    return ""


def walk(root: str) -> Iterator[Tuple[str, List[str], List[str]]]:
    """As ``os.walk`` from the top, but with relative folders ("" first) and at any depth.

    No link to a folder is followed; it counts as a folder. What cannot be listed is empty. Folders
    that are removed from the second list are not entered.
    """
    waiting = [""]
    while waiting:
        above = waiting.pop()
        folders, files = [], []  # type: Tuple[List[str], List[str]]
        with contextlib.suppress(OSError), os.scandir(os.path.join(root, above)) as entries:
            for entry in entries:
                (folders if _is_folder(entry) else files).append(entry.name)
        yield above, folders, files
        for name in reversed(folders):
            inner = os.path.join(above, name)
            if not os.path.islink(os.path.join(root, inner)):
                waiting.append(inner)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in circles
        return False


def remove_all(folder: str) -> None:
    """Removes a folder with all that is in it, at any depth; what cannot be removed stays."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def parts_of(path: str) -> List[str]:
    """The names on a relative path; ValueError for one that could lead anywhere else."""
    parts = path.split("/")
    if len(path) > MOST_CHARACTERS or "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError("not a path inside a folder: %r" % path[:100])
    return parts


def open_folder(root: str, path: str, make: bool = False) -> int:
    """A descriptor of the folder ``path`` below ``root``; empty for ``root`` itself.

    Args:
        root: A folder, named as the user likes.
        path: Relative; where it is a link or anything but a folder, OSError is raised.
        make: Makes what is missing, for the user alone.
    """
    found = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for name in parts_of(path) if path else []:
        try:
            inner = _enter(found, name, make)
        except OSError as problem:
            raise _explained(problem, root, path, found, name) from None
        finally:
            os.close(found)
        found = inner
    return found


def _enter(folder: int, name: str, make: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.open(name, flags, dir_fd=folder)


def _explained(problem: OSError, root: str, path: str, folder: int, name: str) -> OSError:
    """The same problem with the whole path; a link is called by its name."""
    whole = os.path.join(root, path)
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            words = "%s is a symbolic link, and links in there are not followed" % name
            return OSError(errno.ELOOP, words, whole)
    return OSError(problem.errno or errno.EIO, problem.strerror, whole)


class Folders:
    """Folders below a root, each opened once, for many files in few folders.

    Args:
        root: A folder, named as the user likes.
    """

    MOST = 300  # open at once: 256 of the cache's, and some of a tree

    def __init__(self, root: str) -> None:
        self._root = root
        self._open: Dict[str, int] = {}

    def descriptor(self, path: str, make: bool = False) -> int:
        """As :func:`open_folder`; valid until the next call, closed with the others."""
        if path not in self._open:
            if len(self._open) >= self.MOST:
                self.close()
            self._open[path] = open_folder(self._root, path, make)
        return self._open[path]

    def close(self) -> None:
        for found in self._open.values():
            os.close(found)
        self._open = {}

    def __enter__(self) -> "Folders":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, path: str, flags: int) -> int:
        """As :func:`open_file`."""
        above, _, name = path.rpartition("/")
        parts_of(path)
        folder = self.descriptor(above, make=bool(flags & os.O_CREAT))
        try:
            return _open_plain(folder, name, flags)
        except OSError as problem:
            raise _explained(problem, self._root, path, folder, name) from None

    def remove(self, path: str) -> None:
        """Removes a file, if it can be."""
        above, _, name = path.rpartition("/")
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.descriptor(above))


def open_file(root: str, path: str, flags: int) -> int:
    """A descriptor of the plain file ``path`` below ``root``.

    Folders on the way are made when ``flags`` has ``O_CREAT``. OSError where a link or anything
    but a plain file has the name.
    """
    *above, name = parts_of(path)
    folder = open_folder(root, "/".join(above), make=bool(flags & os.O_CREAT))
    try:
        return _open_plain(folder, name, flags)
    except OSError as problem:
        raise _explained(problem, root, path, folder, name) from None
    finally:
        os.close(folder)


def _open_plain(folder: int, name: str, flags: int) -> int:
    # O_NONBLOCK: a named pipe must not keep us waiting for its other end
    # 0o664: with a umask of 000, too, nobody else may write it
    found = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o664, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "not a plain file")
    return found


def own_folder(name: str, otherwise: str) -> str:
    """A folder below /tmp that only this user can write; ``otherwise`` where that name is taken.

    Anybody can make a folder of any name below /tmp, and own what others then put into it.
    """
    path = os.path.join(tempfile.gettempdir(), name)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        about = os.lstat(path)
        if (
            stat.S_ISDIR(about.st_mode)
            and about.st_uid == os.getuid()
            and not (stat.S_IMODE(about.st_mode) & 0o022)
        ):
            return path
    except OSError:
        pass
    os.makedirs(otherwise, 0o700, exist_ok=True)
    return otherwise


def write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def rename(root: str, path: str, target: str, durable: bool = True) -> None:
    """Gives what is at ``path`` the name ``target``; folders on the way are made.

    With ``durable`` it has that name after a power cut, too.
    """
    *above, name = parts_of(path)
    *target_above, target_name = parts_of(target)
    source = open_folder(root, "/".join(above))
    try:
        folder = open_folder(root, "/".join(target_above), make=True)
        try:
            _replace(source, name, folder, target_name)
            if durable:
                os.fsync(folder)
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, os.path.join(root, target)) from None
        finally:
            os.close(folder)
    finally:
        os.close(source)


def _replace(source: int, name: str, folder: int, target: str) -> None:
    """A share of SMB refuses while a process of this host has the target open: tried again."""
    until = time.monotonic() + READERS_S
    while True:
        try:
            os.replace(name, target, src_dir_fd=source, dst_dir_fd=folder)
            return
        except PermissionError:
            ours = os.access(".", os.W_OK | os.X_OK, dir_fd=folder)
            if not ours or time.monotonic() > until:
                raise
        time.sleep(READERS_S / 50)


def write_file(root: str, path: str, data: bytes, durable: bool = True) -> None:
    """Writes a whole file: under its name is either what was there before or all of ``data``.

    Args:
        root, path: The folder, and where the file belongs below it.
        data: All of it.
        durable: Flush it to the disk first.
    """
    file = Arriving(root, path, durable)
    try:
        file.add(0, data)
        file.finish()
    finally:
        file.drop()


def remove(root: str, path: str) -> None:
    """Removes a file or folder: first moved aside, so that its name never holds half of it.

    What cannot be removed is left aside; OSError when it cannot even be moved.
    """
    os.close(open_folder(root, INCOMING, make=True))
    aside = "%s/%s" % (INCOMING, secrets.token_hex(8))
    rename(root, path, aside)
    whole = os.path.join(root, aside)
    if stat.S_ISDIR(os.lstat(whole).st_mode):
        remove_all(whole)
    else:
        os.unlink(whole)


class Arriving:
    """A file that comes block by block: it has its name once it is whole, checked and flushed.

    Args:
        root: The folder.
        path: Where the file belongs below it.
        durable: Flush it to the disk first. Needless only where its hash is looked at again.

    Attributes:
        size: Bytes that have come.
    """

    def __init__(self, root: str, path: str, durable: bool = True) -> None:
        parts_of(path)
        self.size = 0
        self._durable = durable
        self._root, self._path = root, path
        self._part = "%s/%s" % (INCOMING, secrets.token_hex(8))
        self._fd = open_file(root, self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hash of what has come, in hexadecimal."""
        return self._digest.hexdigest()

    def add(self, offset: int, data: bytes) -> None:
        """Adds a block. ValueError when it is not the next one."""
        if offset != self.size:
            raise ValueError("a block at byte %d came where %d was next" % (offset, self.size))
        write_all(self._fd, data)
        self._digest.update(data)
        self.size += len(data)

    def finish(self, size: int = -1, sha256: str = "") -> None:
        """The last block has come: flushes the file and gives it its name.

        Args:
            size: What was announced; -1 for nothing.
            sha256: What was announced; empty for nothing.

        Raises:
            ValueError: The file is not what was announced. Nothing has its name then.
        """
        if size not in (-1, self.size):
            raise ValueError("%d bytes came instead of %d" % (self.size, size))
        if sha256 and sha256 != self.sha256:
            raise ValueError("content does not have the hash %s" % sha256)
        if self._durable:
            os.fsync(self._fd)
        rename(self._root, self._part, self._path, self._durable)
        self._part = ""
        self.drop()

    def drop(self) -> None:
        """Forgets what has come, unless it is finished."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._part:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._root, self._part))
            self._part = ""
