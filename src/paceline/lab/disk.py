"""Filling a host's disk, and emptying it again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from paceline.spec.errors import LabError

_BALLAST = ".paceline-lab-ballast"
_LIMIT = 1 << 30  # bytes; a file system in memory is filled with real memory
_CHUNK = 1 << 20
_TMPFS = "tmpfs"


def fill(path: str, free: int, mountinfo: str) -> None:
    """Writes a file that leaves ``free`` bytes; refuses what is not the host's own.

    Args:
        mountinfo: /proc/PID/mountinfo of the host.
    """
    room = _room(path)
    kind = kind_of(os.stat(path).st_dev, mountinfo)  # noqa: PTH116
    if kind != _TMPFS or room > _LIMIT:
        raise LabError(
            f"{path} is not a disk that can be filled",
            found=f"{room >> 20} MiB are free there, on a file system of type {kind}",
            remedy=f"bring the lab up with a small disk there: --private {path}:64m",
        )
    _write(Path(path) / _BALLAST, max(0, room - free))


def _room(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def kind_of(device: int, mountinfo: str) -> str:
    """Type of the file system on a device, according to the text of a mountinfo file."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        if line.split()[2] == wanted:
            return line.partition(" - ")[2].split()[0]
    return "unknown"


def _write(file: Path, size: int) -> None:
    with file.open("wb", buffering=0) as ballast:
        while size > 0:
            try:
                size -= ballast.write(bytes(min(size, _CHUNK)))
            except OSError:  # full is what we want
                return


def unfill(path: str) -> None:
    (Path(path) / _BALLAST).unlink(missing_ok=True)


def in_child(enter: Callable[[], None], work: Callable[[], None]) -> None:
    """Runs ``work`` in a child that called ``enter`` first; its error is raised here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(_child(enter, work, write))
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    if os.waitpid(child, 0)[1]:
        message, found, remedy = said.split("\0")
        raise LabError(message, found=found, remedy=remedy)


def _child(enter: Callable[[], None], work: Callable[[], None], write: int) -> int:
    try:
        enter()
        work()
    except LabError as error:
        os.write(write, "\0".join((error.message, error.found, error.remedy)).encode())
        return 1
    except BaseException as error:
        os.write(write, f"it cannot be done\0{error}\0".encode())
        return 1
    return 0
