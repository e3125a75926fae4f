"""Reads untrusted files of a run directory.

A run directory may come from another machine or a stranger, or may be incomplete after a full disk.
Therefore reading follows no links, opens only regular files, is bounded in size, and treats values
of an unexpected type as missing.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from paceline.spec import rundir

MAX_OBJECT_BYTES = 8 << 20  # of a .json file
RECORDS_BYTES = 4 << 20  # read of the beginning, and of the end, of a .jsonl file
MAX_RECORD_BYTES = 1 << 20  # of one line of it
NUM_SAMPLES = 64  # evenly spaced, of a huge file


def open_regular(path: Path) -> IO[bytes]:
    """Opens a regular file for reading. OSError for a link, a pipe, a device or a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "no regular file", str(path))
    return os.fdopen(fd, "rb")


def is_regular(path: Path) -> bool:
    """Whether the path is a regular file and no link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def folders_in(path: Path) -> Iterator[Path]:
    """The folders in a folder, without links, by name; none if it cannot be read."""
    if path.is_symlink():
        return
    try:
        names = sorted(entry.name for entry in os.scandir(path)
                       if entry.is_dir(follow_symlinks=False))  # fmt: skip
    except OSError:
        return
    yield from (path / name for name in names)


def head_and_tail(path: Path, head: int, tail: int, begin: int = 0) -> tuple[bytes, bytes]:
    """The first and last bytes of a regular file, or OSError; of a short file, all and nothing.

    Args:
        begin: Bytes at the file's beginning that do not count.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        stream.seek(min(begin, size))
        if size - begin <= head + tail:
            return stream.read(head + tail), b""
        first = stream.read(head)
        stream.seek(size - tail)
        return first, stream.read(tail)


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; ``None`` if there is none."""
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_OBJECT_BYTES + 1)
    except (OSError, ValueError):
        return None
    value = parse_json(data.decode("utf-8", "replace")) if len(data) <= MAX_OBJECT_BYTES else None
    return value if isinstance(value, dict) else None


def read_records(path: Path, size: int = RECORDS_BYTES, but: bytes = b"") -> list[dict[str, Any]]:
    """The objects of a ``.jsonl`` file in order; of a huge one those at its beginning and end.

    Args:
        size: Bytes read of the beginning, and of the end.
        but: Skip lines that contain these bytes, without parsing them.
    """
    try:
        head, tail = head_and_tail(path, size, size)
    except (OSError, ValueError):
        return []
    lines = [*head.split(b"\n"), *tail.split(b"\n")]  # a partial line is no valid JSON
    return _objects([line for line in lines if but not in line] if but else lines)


def last_record(path: Path, size: int, predicate: Callable[[dict[str, Any]], bool],
                containing: bytes = b"") -> dict[str, Any] | None:  # fmt: skip
    """The last object of a ``.jsonl`` file that the predicate accepts, in its last bytes.

    Args:
        containing: Skip lines without these bytes, without parsing them.
    """
    try:
        head, tail = head_and_tail(path, 0, size)
    except (OSError, ValueError):
        return None
    lines = (line for line in reversed((head or tail).split(b"\n")) if containing in line)
    objects = (record for line in lines for record in _objects([line]))
    return next(filter(predicate, objects), None)


def sampled_records(path: Path, size: int) -> tuple[list[dict[str, Any]], bool]:
    """The objects of a ``.jsonl`` file in order; of a huge one samples from all over it.

    Reads at most ``size`` bytes. Also returns whether these are all objects.
    """
    try:
        with open_regular(path) as stream:
            file_size = os.fstat(stream.fileno()).st_size
            if file_size <= size:
                return _objects(stream.read(size).split(b"\n")), True
            sample_bytes, lines = size // NUM_SAMPLES, list[bytes]()
            for sample in range(NUM_SAMPLES):
                stream.seek((file_size - sample_bytes) * sample // (NUM_SAMPLES - 1))
                lines += stream.read(sample_bytes).split(b"\n")  # partial lines are no valid JSON
    except (OSError, ValueError):
        return [], True
    return _objects(lines), False


def _objects(lines: list[bytes]) -> list[dict[str, Any]]:
    values = (parse_json(line.decode("utf-8", "replace")) for line in lines
              if len(line) <= MAX_RECORD_BYTES)  # fmt: skip
    return [value for value in values if isinstance(value, dict)]


def parse_json(text: str) -> Any:
    """The value of a JSON text; ``None`` if it is invalid."""
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return None


def as_int(value: Any) -> int | None:
    """A 64-bit integer; ``None`` for anything else."""
    is_valid = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return value if is_valid else None


def as_float(value: Any) -> float:
    """A finite number as a float; 0 for anything else."""
    is_valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_valid and abs(value) < 1 << 63 and math.isfinite(value) else 0.0


def as_text(value: Any, limit: int = 1 << 20) -> str:
    """A text; empty for anything else."""
    return value[:limit] if isinstance(value, str) else ""


def objects_in(value: Any, limit: int = 10_000) -> list[Mapping[str, Any]]:
    """The objects in a list; an empty list for anything else."""
    if not isinstance(value, list):
        return []
    return [entry for entry in value[:limit] if isinstance(entry, dict)]


def cause_in(findings: Iterable[Mapping[str, Any]]) -> str:
    """The cause of a failed run by its findings, as `paceline explain` words it; empty if none."""
    causes = (as_text(finding.get("message")) for finding in findings
              if finding.get("outcome") == "fail"
              and as_text(finding.get("check"), 100).startswith("explain/"))  # fmt: skip
    return next(causes, "")


def recorded_cause(run: Path) -> str:
    """:func:`cause_in` of the findings of a run directory."""
    findings = (read_object(run / rundir.FINDINGS) or {}).get("findings")
    return cause_in(objects_in(findings))


def object_in(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object in a field; an empty one for anything else."""
    entry = value.get(name)
    return entry if isinstance(entry, dict) else {}
