"""File operations below a folder that follow no links inside it and never leave it.

The folder itself may be reached through links. Used for the cache and the run directory.
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
import subprocess
import tempfile
import time
import unicodedata
from typing import Callable, Dict, Iterator, List, Optional, Tuple

INCOMING = ".paceline-incoming"  # folder below the root: incomplete files
MAX_PATH_LENGTH = 4096
MAX_DEPTH = 64  # names on the path of a file that comes from another machine
MAX_NAME_BYTES = 255  # of a name, as on most file systems
REPLACE_TIMEOUT_S = 2.0
_CONTROL_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # also ends of lines


def fold_name(name: str) -> str:
    """Normalises a name as file systems may compare it: without case, invisible characters."""
    if name.isascii():
        return name.lower()
    normalized = unicodedata.normalize("NFKC", name).casefold()
    return "".join(character for character in normalized if unicodedata.category(character) != "Cf")


def refusal_reason(path: str) -> str:
    """Returns why a file from another machine or a rank may not be made; empty if it may.

    Git runs programs that a repository's configuration names. Every repository has a file HEAD,
    even a bare one, which has no ``.git``.
    """
    try:
        parts = split_path(path)
    except ValueError as problem:
        return str(problem)
    if len(parts) > MAX_DEPTH:
        return "more than %d folders deep" % MAX_DEPTH
    try:
        if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts):
            return "a name of more than %d bytes" % MAX_NAME_BYTES
    except UnicodeEncodeError:
        return "a name that no file can have"
    if _CONTROL_CHARACTER.search(path):
        return "a control character in its name"
    if any(fold_name(part).rstrip(". ") == ".git" for part in parts):
        return "part of a git repository"
    return "named HEAD, as in a git repository" if fold_name(parts[-1]) == "head" else ""


def walk(root: str) -> Iterator[Tuple[str, List[str], List[str]]]:
    """Walks a tree like ``os.walk``, but yields relative folders ("" first), at any depth.

    A link to a folder counts as a folder but is not followed. An unreadable folder counts as empty.
    Folders that the caller removes from the second list are not entered.
    """
    waiting = [""]
    while waiting:
        parent = waiting.pop()
        folders, files = [], []  # type: Tuple[List[str], List[str]]
        with contextlib.suppress(OSError), os.scandir(os.path.join(root, parent)) as entries:
            for entry in entries:
                (folders if _is_folder(entry) else files).append(entry.name)
        yield parent, folders, files
        for name in reversed(folders):
            inner = os.path.join(parent, name)
            if not os.path.islink(os.path.join(root, inner)):
                waiting.append(inner)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads in circles
        return False


def remove_tree(folder: str) -> None:
    """Removes a folder and its content at any depth; ignores errors."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def split_path(path: str) -> List[str]:
    """Splits a relative path into names; ValueError if it could lead out of its root."""
    parts = path.split("/")
    if len(path) > MAX_PATH_LENGTH or "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError("not a path inside a folder: %r" % path[:100])
    return parts


def open_folder(root: str, path: str, make: bool = False) -> int:
    """Opens the folder ``path`` below ``root`` and returns its descriptor.

    Args:
        root, path: Path of a folder, which may contain links; relative path, which may be empty.
        make: Whether to make missing folders, which only the user can access.

    Raises:
        OSError: A part of ``path`` is a link or not a folder, or is missing.
        ValueError: ``path`` could lead out of ``root``.
    """
    names = split_path(path) if path else []
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for name in names:
        try:
            inner = _open_child(folder, name, make)
        except OSError as problem:
            raise _with_path(problem, root, path, folder, name) from None
        finally:
            os.close(folder)
        folder = inner
    return folder


def _open_child(folder: int, name: str, make: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.open(name, flags, dir_fd=folder)


def _with_path(problem: OSError, root: str, path: str, folder: int, name: str) -> OSError:
    """Returns the error with the full path, and with a clear text if ``name`` is a link."""
    full_path = os.path.join(root, path)
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            message = "%s is a symbolic link, and links in there are not followed" % name
            return OSError(errno.ELOOP, message, full_path)
    return OSError(problem.errno or errno.EIO, problem.strerror, full_path)


class FolderCache:
    """Keeps descriptors of folders below a root, for many files in few folders.

    Args:
        root: Path of a folder, which may contain links.
    """

    MAX_OPEN = 300  # the 256 folders of the cache, and some of a tree

    def __init__(self, root: str) -> None:
        self._root = root
        self._open: Dict[str, int] = {}

    def descriptor(self, path: str, make: bool = False) -> int:
        """Opens a folder as :func:`open_folder` does; valid until the next call of any method."""
        if path not in self._open:
            if len(self._open) >= self.MAX_OPEN:
                self.close()
            self._open[path] = open_folder(self._root, path, make)
        return self._open[path]

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open = {}

    def __enter__(self) -> "FolderCache":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, path: str, flags: int) -> int:
        """Opens a file as :func:`open_file` does."""
        parent, _, name = path.rpartition("/")
        split_path(path)
        folder = self.descriptor(parent, make=bool(flags & os.O_CREAT))
        try:
            return _open_regular(folder, name, flags)
        except OSError as problem:
            raise _with_path(problem, self._root, path, folder, name) from None

    def remove(self, path: str) -> None:
        """Removes a file; ignores errors."""
        parent, _, name = path.rpartition("/")
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.descriptor(parent))


def open_file(root: str, path: str, flags: int) -> int:
    """Opens the regular file ``path`` below ``root`` and returns its descriptor.

    With ``O_CREAT`` in ``flags``, missing parent folders are made. Raises OSError if the file
    cannot be opened, or is a link or not a regular file.
    """
    *parents, name = split_path(path)
    folder = open_folder(root, "/".join(parents), make=bool(flags & os.O_CREAT))
    try:
        return _open_regular(folder, name, flags)
    except OSError as problem:
        raise _with_path(problem, root, path, folder, name) from None
    finally:
        os.close(folder)


def resolve_link(root: str, path: str) -> str:
    """Returns the path below ``root`` of the file to which ``path`` leads, if it is a link.

    Only a link to a name in its own folder counts. Any other path is returned as it is: it cannot
    be opened if it is a link.
    """
    with contextlib.suppress(OSError):
        target = os.readlink(os.path.join(root, path))
        if "/" not in target and not target.startswith("."):
            return os.path.join(os.path.dirname(path), target)
    return path


def _open_regular(folder: int, name: str, flags: int) -> int:
    # O_NONBLOCK: opening a named pipe must not block
    # 0o664: others may not write it, even with a umask of 000
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o664, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file")
    return fd


def _keeps_names(folder: str) -> bool:
    """Whether other users cannot rename what this user makes in a folder."""
    status = os.stat(folder)
    is_sticky_or_closed = status.st_mode & stat.S_ISVTX or not status.st_mode & 0o022
    return bool(is_sticky_or_closed) and status.st_uid in (0, os.getuid())


def make_folder(path: str, mode: int = 0o700) -> None:
    """Makes a folder and its missing parents with ``mode``, less the umask; it may exist.

    ``os.makedirs`` gives its mode to the last one only: with a umask of 000, others could rename
    what is in its parents.
    """
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, mode)
        except FileExistsError:  # another process was faster
            if not os.path.isdir(folder):
                raise


def tighten_umask() -> None:
    """Makes files that this process will create unwritable for others, whatever its umask was."""
    os.umask(os.umask(0o077) | 0o002)


def private_temp_folder(name: str, fallback: str) -> str:
    """Makes a folder below /tmp that only this user can write; ``fallback`` if the name is taken.

    Any user could have made a folder of that name before. ``fallback`` also if other users could
    rename the folder, because somebody has set ``TMPDIR`` to such a place.
    """
    path = os.path.join(tempfile.gettempdir(), name)
    with contextlib.suppress(OSError):
        if not _keeps_names(os.path.dirname(path)):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
        is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_own_folder and not status.st_mode & 0o022:
            return path
    make_folder(fallback)
    return fallback


def write_fully(file: int, data: bytes) -> None:
    """Writes all data to a descriptor, in several writes if necessary."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def rename(root: str, path: str, target: str, durable: bool = True) -> None:
    """Renames a file or folder, replacing a file; makes missing folders of ``target``.

    With ``durable`` the new name survives a power cut.
    """
    *parents, name = split_path(path)
    *target_parents, target_name = split_path(target)
    source = open_folder(root, "/".join(parents))
    try:
        folder = open_folder(root, "/".join(target_parents), make=True)
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
    """Renames a file; retries on SMB shares, which refuse while the target is open."""
    deadline = time.monotonic() + REPLACE_TIMEOUT_S
    while True:
        try:
            os.replace(name, target, src_dir_fd=source, dst_dir_fd=folder)
            return
        except PermissionError:
            is_writable = os.access(".", os.W_OK | os.X_OK, dir_fd=folder)
            if not is_writable or time.monotonic() > deadline:
                raise
        time.sleep(REPLACE_TIMEOUT_S / 50)


def write_file(root: str, path: str, data: bytes, durable: bool = True) -> None:
    """Writes a file atomically; with ``durable`` its content is flushed to disk first."""
    file = IncomingFile(root, path, durable)
    try:
        file.add(0, data)
        file.finish()
    finally:
        file.drop()


def remove(root: str, path: str) -> None:
    """Removes a file or folder, moved aside first so that its name never has partial content.

    Content that cannot be removed stays aside. Raises OSError if it cannot be moved.
    """
    os.close(open_folder(root, INCOMING, make=True))
    aside = "%s/%s" % (INCOMING, secrets.token_hex(8))
    rename(root, path, aside)
    full_path = os.path.join(root, aside)
    if stat.S_ISDIR(os.lstat(full_path).st_mode):
        remove_tree(full_path)
    else:
        os.unlink(full_path)


class IncomingFile:
    """A file that is received in blocks; it gets its name once it is complete and checked.

    Args:
        root, path: The folder, and the file's path below it.
        durable: Whether to flush the file to disk before it gets its name.
        before_rename: Called with the path of the complete file before that gets its name.

    Attributes:
        size: Bytes received.
    """

    def __init__(
        self,
        root: str,
        path: str,
        durable: bool = True,
        before_rename: Optional[Callable[[str], None]] = None,
    ) -> None:
        split_path(path)
        self.size = 0
        self._durable, self._before_rename = durable, before_rename
        self._root, self._path = root, path
        self._part = "%s/%s" % (INCOMING, secrets.token_hex(8))
        self._fd = self._create()
        self._digest = hashlib.sha256()

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        for _ in range(5):
            with contextlib.suppress(FileNotFoundError):
                return open_file(self._root, self._part, flags)
            # another receiver has just removed the empty folder
        return open_file(self._root, self._part, flags)

    @property
    def sha256(self) -> str:
        """SHA-256 of the received bytes, in hexadecimal."""
        return self._digest.hexdigest()

    def add(self, offset: int, data: bytes) -> None:
        """Appends a block. ValueError if it is not the next one."""
        if offset != self.size:
            raise ValueError("a block at byte %d came where %d was next" % (offset, self.size))
        write_fully(self._fd, data)
        self._digest.update(data)
        self.size += len(data)

    def finish(self, size: int = -1, sha256: str = "") -> None:
        """Flushes the file and gives it its name; ValueError if it differs from what is expected.

        ``size`` is -1 and ``sha256`` is empty if unknown.
        """
        if size not in (-1, self.size):
            raise ValueError("%d bytes came instead of %d" % (self.size, size))
        if sha256 and sha256 != self.sha256:
            raise ValueError("content does not have the hash %s" % sha256)
        if self._durable:
            os.fsync(self._fd)
        if self._before_rename:
            self._before_rename(os.path.join(self._root, self._part))
        rename(self._root, self._part, self._path, self._durable)
        self._part = ""
        self.drop()

    def drop(self) -> None:
        """Removes the file unless it is finished."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._part:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._root, self._part))
            self._part = ""
