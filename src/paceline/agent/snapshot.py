"""Code by content: is the same tree here already, and if not, build it from shipped blobs.

A manifest is a list of ``[path, sha256, mode, size]``; paths are relative, ``/``-separated.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

Entry = List[Any]
Message = Dict[str, Any]
BLOCK = 1 << 20
KEPT_S = 30 * 24 * 3600.0


def cache_folder() -> Path:
    """Where the agent keeps what was shipped: ``$XDG_CACHE_HOME/paceline``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "paceline"


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def compare(root: str, manifest: List[Entry]) -> Message:
    """How the tree at ``root`` differs from the manifest: missing and different paths."""
    missing, different = [], []
    for path, sha256, _, size in manifest:
        file = Path(root) / path
        try:
            same = file.stat().st_size == size and hash_file(file) == sha256
        except OSError:
            missing.append(path)
            continue
        if not same:
            different.append(path)
    return {"exists": Path(root).is_dir(), "missing": missing, "different": different}


def _blob(sha256: str) -> Path:
    return cache_folder() / "blobs" / sha256[:2] / sha256


def lacking(manifest: List[Entry]) -> List[str]:
    """Hashes of the manifest whose content is not in the cache, each once."""
    wanted = {entry[1]: entry[3] for entry in manifest}
    return sorted(h for h, size in wanted.items() if not _has(h, size))


def _has(sha256: str, size: int) -> bool:
    with contextlib.suppress(OSError):
        return _blob(sha256).stat().st_size == size
    return False


def put(sha256: str, offset: int, data: bytes, last: bool) -> None:
    """Stores a block of one content; it counts once the last block has come and the hash fits.

    Blocks come in order. ValueError when the whole is not what its name says.
    """
    write_block(_blob(sha256), offset, data, last, sha256)


def write_block(target: Path, offset: int, data: bytes, last: bool, sha256: str = "") -> None:
    """Writes a block of a file that appears under its name once it is whole.

    Args:
        target: The file.
        offset: Where the block belongs; blocks come in order.
        data: The block.
        last: It is the last one.
        sha256: Hash that the whole must have; empty for none.
    """
    part = target.with_name("%s.%d.part" % (target.name, os.getpid()))
    part.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with part.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)
        if last:
            if sha256 and hash_file(part) != sha256:
                raise ValueError("content does not have the hash %s" % sha256)
            part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def run_folder(key: str) -> Path:
    """This node's own folder for the files of a run directory that it does not see."""
    return cache_folder() / "runs" / key


def forget_old(keep: str, max_age_s: float = KEPT_S) -> None:
    """Removes what was shipped or left here and has not been touched for a month.

    Args:
        keep: The folder that this agent runs from.
        max_age_s: Age in seconds.
    """
    before = time.time() - max_age_s
    for folder in ("agent", "blobs", "runs", "jobs"):
        for path in (cache_folder() / folder).glob("*"):
            with contextlib.suppress(OSError):
                if str(path) != keep and _newest(path) < before:
                    shutil.rmtree(str(path))


def _newest(folder: Path) -> float:
    """When anything in a folder was last changed or used."""
    times = [folder.stat().st_mtime]
    for path in folder.rglob("*"):
        stat = path.stat()
        times.append(max(stat.st_mtime, stat.st_atime))
    return max(times)


def materialise(root: str, manifest: List[Entry]) -> None:
    """Builds the tree at ``root`` (a folder of its own) from the cache; checks every hash."""
    Path(root).mkdir(parents=True, exist_ok=True)
    for path, sha256, mode, _ in manifest:
        target = Path(root) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(_blob(sha256)), str(target))
        target.chmod(mode)
        if hash_file(target) != sha256:
            _blob(sha256).unlink()
            raise ValueError("the cached content of %s was damaged; try again" % path)


def changed_files(root: str, manifest: Optional[List[Entry]]) -> List[Message]:
    """Files below ``root`` that the manifest does not have or has otherwise.

    Args:
        root: The folder; one that does not exist has no files.
        manifest: What was there before; ``None`` when nothing was.
    """
    before = {entry[0]: entry for entry in manifest or []}
    found = []
    for path, size in _walk(Path(root)):
        entry = before.get(path)
        same = entry and entry[3] == size and hash_file(Path(root) / path) == entry[1]
        if not same and "__pycache__" not in path.split("/"):
            found.append({"path": path, "size": size})
    return found


def _walk(root: Path) -> Iterator[Tuple[str, int]]:
    for folder, _, names in os.walk(str(root)):
        for name in sorted(names):
            path = Path(folder) / name
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    yield path.relative_to(root).as_posix(), path.stat().st_size


def read_blocks(path: Path) -> Iterator[Tuple[int, bytes]]:
    """Offset and content, block by block; an empty file gives one empty block."""
    with path.open("rb") as file:
        offset = 0
        while True:
            data = file.read(BLOCK)
            if data or offset == 0:
                yield offset, data
            if not data:
                return
            offset += len(data)
