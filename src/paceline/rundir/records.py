"""Reads the files of a run directory, whatever stands in them.

A run directory may come from another machine or a stranger, or have been cut short by a full disk.
So no link is followed, nothing but a regular file is opened, no more than a bounded part is read,
and what is not of the expected kind counts as absent.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

OBJECT_BYTES = 8 << 20  # of a .json file; a larger one is not ours
RECORDS_BYTES = 4 << 20  # read of the beginning and of the end of a .jsonl file
RECORD_CHARS = 1 << 20  # of one line of it


def open_regular(path: Path) -> IO[bytes]:
    """Opens a regular file for reading. OSError for a link, a pipe, a device or a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "no regular file", str(path))
    return os.fdopen(fd, "rb")


def is_regular(path: Path) -> bool:
    """Whether a regular file is there, itself and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def folders_in(path: Path) -> Iterator[Path]:
    """The folders in a folder that are no links, by name; none when it cannot be read."""
    if path.is_symlink():
        return
    try:
        names = sorted(entry.name for entry in os.scandir(path)
                       if entry.is_dir(follow_symlinks=False))  # fmt: skip
    except OSError:
        return
    yield from (path / name for name in names)


def head_and_tail(path: Path, head: int, tail: int) -> tuple[bytes, bytes]:
    """The first and the last bytes of a regular file; the second is empty when it is short.

    OSError when it cannot be read.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= head + tail:
            return stream.read(head + tail), b""
        begin = stream.read(head)
        stream.seek(size - tail)
        return begin, stream.read(tail)


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; ``None`` when there is none that can be read."""
    try:
        with open_regular(path) as stream:
            data = stream.read(OBJECT_BYTES + 1)
    except (OSError, ValueError):
        return None
    value = parsed(data.decode("utf-8", "replace")) if len(data) <= OBJECT_BYTES else None
    return value if isinstance(value, dict) else None


def read_records(path: Path, size: int = RECORDS_BYTES, but: bytes = b"") -> list[dict[str, Any]]:
    """The objects of a ``.jsonl`` file in order; of a huge one those at its beginning and end.

    Args:
        path: The file.
        size: Bytes read of the beginning, and of the end.
        but: Lines with these bytes are left out, which takes much less time than reading them.
    """
    try:
        begin, end = head_and_tail(path, size, size)
    except (OSError, ValueError):
        return []
    lines = [*begin.split(b"\n"), *end.split(b"\n")]  # a line that was cut is no JSON
    return _objects([line for line in lines if but not in line] if but else lines)


def last_record(path: Path, size: int, fits: Callable[[dict[str, Any]], bool]) -> (
        dict[str, Any] | None):  # fmt: skip
    """The last object of a ``.jsonl`` file that fits, of those in its last bytes."""
    try:
        begin, end = head_and_tail(path, 0, size)
    except (OSError, ValueError):
        return None
    objects = (one for line in reversed((begin or end).split(b"\n")) for one in _objects([line]))
    return next(filter(fits, objects), None)


def sampled_records(path: Path, size: int, places: int = 64) -> tuple[list[dict[str, Any]], bool]:
    """The objects of a ``.jsonl`` file in order; of a huge one those at places all over it.

    Args:
        path: The file.
        size: Bytes read of it at most.
        places: At how many, equally far apart; the first and the last bytes are among them.

    Returns:
        The objects, and whether that is all of them.
    """
    try:
        with open_regular(path) as stream:
            whole_size = os.fstat(stream.fileno()).st_size
            if whole_size <= size:
                return _objects(stream.read(size).split(b"\n")), True
            part, lines = size // places, list[bytes]()
            for place in range(places):
                stream.seek((whole_size - part) * place // (places - 1))
                lines += stream.read(part).split(b"\n")  # a line that was cut is no JSON
    except (OSError, ValueError):
        return [], True
    return _objects(lines), False


def _objects(lines: list[bytes]) -> list[dict[str, Any]]:
    found = (parsed(line.decode("utf-8", "replace")) for line in lines
             if len(line) <= RECORD_CHARS)  # fmt: skip
    return [value for value in found if isinstance(value, dict)]


def parsed(text: str) -> Any:
    """What a JSON text holds; ``None`` where it holds nothing that can be read."""
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return None


def whole(value: Any) -> int | None:
    """A whole number as people and machines use them; ``None`` for anything else."""
    usable = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return value if usable else None


def number(value: Any) -> float:
    """A finite number; 0 for anything else."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if usable and abs(value) < 1 << 63 and math.isfinite(value) else 0.0


def words(value: Any, limit: int = 1 << 20) -> str:
    """A text; empty for anything else."""
    return value[:limit] if isinstance(value, str) else ""
