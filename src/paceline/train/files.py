"""Files that are either the old ones or the new ones, never half of something."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any


def open_plain(path: Path, flags: int) -> IO[bytes]:
    """Opens a file for writing; OSError where it is a link.

    A run directory may come from a stranger: what it links to is not ours to change.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    return os.fdopen(descriptor, "ab" if flags & os.O_APPEND else "rb+")


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes under a temporary name and renames.

    Args:
        path: The file; its folder is made where it is missing.
        content: All of it.
        durable: Waits until it is on the disk, before and after the renaming.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open_plain(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented UTF-8 JSON."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def sha256(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
