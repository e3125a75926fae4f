"""Writes files atomically: a killed process leaves the old or the new content, or whole lines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import math
import os
import secrets
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from paceline.spec.rundir import backup_name
from paceline.spec.training.metrics import StepFilter

_BLOCK_BYTES = 1 << 16
MAX_DESCRIPTION_BYTES = 64 << 20  # states and manifests have kilobytes


def open_regular(path: Path, flags: int) -> IO[bytes]:
    """Opens a regular file for writing. OSError if it is a link, a pipe or a device.

    A run directory may come from a stranger: what it links to is not ours to change, and a pipe
    would keep us waiting for its reader.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o664)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(descriptor, "ab" if flags & os.O_APPEND else "rb+")


def check_regular(path: Path, max_bytes: int = sys.maxsize) -> None:
    """Raises OSError unless a file, which a library will open, is a regular one of that size."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    if info.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes >> 20} MiB", str(path))


def stored_bytes(path: Path) -> int:
    """Returns the bytes of a regular file without its holes, which may be of any length."""
    total = end = 0
    with path.open("rb") as file:
        try:
            while True:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                total += end - start
        except OSError as error:  # ENXIO: no more data; others: this file system cannot tell
            return total if error.errno == errno.ENXIO else path.stat().st_size


def memory_bytes() -> int:
    """Returns the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def max_content_bytes() -> int:
    """Returns the size of the largest data file that is read as a whole: a quarter of the memory.

    The text, lines or arrays that are made from its bytes are in memory at the same time. A file
    with holes may be longer than the disk.
    """
    return memory_bytes() // 4


def read_bytes_limited(path: Path, max_bytes: int = MAX_DESCRIPTION_BYTES) -> bytes:
    """Returns a regular file, by default of at most 64 MiB. OSError for others and larger ones.

    A run directory may come from a stranger: a pipe would keep us waiting, and a device or a file
    with holes has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        limit = min(max_bytes, max(info.st_size, MAX_DESCRIPTION_BYTES))  # of a buffer's size
        content = file.read(limit + 1) if info.st_size <= limit else b""
    if max(info.st_size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"more than {limit >> 20} MiB", str(path))
    return content


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes a file under a temporary name and renames it; removes leftovers of killed processes.

    Args:
        durable: Waits until the file and its new name are on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_and_replace(temporary, path, content, durable=durable)
    except FileNotFoundError:  # between the end of its lock and the renaming it looked left behind
        _write_and_replace(temporary, path, content, durable=durable)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        remove_stale(stale)


def _write_and_replace(temporary: Path, path: Path, content: bytes, *, durable: bool) -> None:
    with open_regular(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
        with contextlib.suppress(OSError):
            lock(file.fileno())  # marks the file as being written
        file.write(content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    replace(temporary, path)


def remove_stale(path: Path) -> None:
    """Removes a temporary file whose process was killed."""
    with contextlib.suppress(OSError), open_regular(path, os.O_RDWR) as file:
        free = lock(file.fileno())
        is_old = time.time() - os.fstat(file.fileno()).st_mtime > _STALE_FILE_S
        if free or (free is None and is_old):
            path.unlink()


def replace(source: Path, target: Path) -> None:
    """Renames ``source`` to ``target``, replacing it.

    An SMB share refuses this while a process of this host has the target open, and may have removed
    the target by then. So it is retried until the reader is done; OSError after five seconds.
    """
    deadline = time.monotonic() + _REPLACE_TIMEOUT_S
    while True:
        try:
            source.replace(target)
            return
        except PermissionError:
            is_writable = os.access(target.parent, os.W_OK | os.X_OK)
            if not is_writable or time.monotonic() > deadline:
                raise
        time.sleep(_REPLACE_TIMEOUT_S / 50)


_REPLACE_TIMEOUT_S = 5.0
_STALE_FILE_S = 3600.0  # without a change, on a file system without locks
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def lock(descriptor: int, wait: bool = False) -> bool | None:
    """Takes the kernel's lock of a file, against other processes and, on NFS and SMB, other hosts.

    Args:
        descriptor: Descriptor of the file, open for writing; closing it releases the lock.
        wait: Waits as long as another process holds the lock.

    Returns:
        Whether the lock is held now; ``None`` on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        if error.errno in (errno.EAGAIN, errno.EACCES) and not wait:  # SMB says the second
            return False
        raise
    return True


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def json_line(message: Mapping[str, Any]) -> bytes:
    """Returns one JSON line; numbers that JSON does not know become null."""
    values = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in message.items()
    }
    return (json.dumps(values, default=str) + "\n").encode()


class RecordFile:
    """A file to which records are appended.

    A resumed run repeats the steps after its checkpoint with the same results; records of steps
    that are in the file already are not written again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._steps = StepFilter()
        self._failed = False
        _truncate_partial_line(path)

    def append(self, record: Mapping[str, Any]) -> bool:
        """Adds a record with the current time; returns whether it was new."""
        is_new = self._steps.accept(record)
        if is_new:
            self._write(json_line({"time": round(time.time(), 3), **record}))
        return is_new

    def _write(self, content: bytes) -> None:
        try:
            with open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
                file.write(content)
        except OSError as error:  # a full disk ends no training
            if not self._failed:
                print(f"warning: {self.path}: {error.strerror}", file=sys.stderr, flush=True)
            self._failed = True

    def skip_recorded(self) -> None:
        self._steps.resume(self.path)

    def back_up(self) -> None:
        """Renames the records of an earlier run and starts a new file."""
        if self.path.exists():
            self.path.rename(backup_name(self.path))


def _truncate_partial_line(path: Path) -> None:
    """Removes an unfinished line of a killed process."""
    with contextlib.suppress(OSError), open_regular(path, os.O_RDWR) as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            if (position := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + position + 1
                break
            end = start
        if end < size:
            file.truncate(end)
