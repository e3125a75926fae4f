"""One checkpoint made by several ranks in one folder, without a word over the network.

Every rank writes its files and then a note with their hashes; rank 0 waits for all notes and
publishes the checkpoint. So the training never waits for a disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from paceline.train import files
from paceline.train.checkpoints.manifest import Entry
from paceline.train.comms import Comms

PATIENCE = 60.0  # seconds in which nothing at all is written
LAST_SECONDS = 5.0  # the same when the training has failed and other ranks may be gone
_LOOK = 0.05


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part in a checkpoint of all ranks.

    Attributes:
        folder: The temporary folder, seen by all of them.
        rank: This process.
        size: Number of ranks.
    """

    folder: Path
    rank: int
    size: int

    def note(self, rank: int) -> Path:
        """Where a rank says what it has written."""
        return self.folder / f".part-{rank}.json"


def folder_of_all(comms: Comms, folder: Path, owner: int = 0) -> bool:
    """Whether every rank sees the owner's folder: found out by a mark that the owner makes in it.

    Args:
        comms: All ranks must call this.
        folder: Of the owner; what other ranks give does not matter.
        owner: A rank.
    """
    mine = comms.world.rank == owner
    name = f".seen-{secrets.token_hex(8)}"
    mark = Path(comms.texts(str(folder.resolve() / name) if mine else "")[owner])
    try:
        if mine:
            with contextlib.suppress(OSError):  # nobody sees a mark in a read-only folder
                mark.touch()
        comms.barrier()
        seen = comms.rows(
            torch.tensor([int(os.access(mark, os.F_OK))])
        )  # also where it is forbidden
        return bool(seen.all())
    finally:
        if mine:
            mark.unlink(missing_ok=True)


def contribute(part: Part, write: Callable[[], Mapping[str, Entry]]) -> None:
    """Writes this rank's files and the note about them, or about why that failed.

    Raises:
        OSError: The files could not be written.
    """
    try:
        entries = {name: asdict(entry) for name, entry in write().items()}
    except Exception as error:
        with contextlib.suppress(OSError):
            files.write_json(part.note(part.rank), {"problem": f"rank {part.rank}: {error}"})
        raise
    files.write_json(part.note(part.rank), {"files": entries})


def collect(part: Part, given_up: threading.Event) -> dict[str, Entry]:
    """Waits for the other ranks' notes and takes them away.

    Args:
        part: Of rank 0.
        given_up: Set when other ranks may be gone.

    Returns:
        What all of them have written.

    Raises:
        OSError: A rank could not write, or nothing was written for :data:`PATIENCE`.
    """
    entries: dict[str, Entry] = {}
    waiting = set(range(1, part.size))
    watch = _Watch(part.folder)
    while waiting:
        for rank in [rank for rank in waiting if part.note(rank).exists()]:
            entries |= _read(part.note(rank))
            waiting.remove(rank)
        if waiting and watch.idle() > (LAST_SECONDS if given_up.is_set() else PATIENCE):
            missing = ", ".join(map(str, sorted(waiting)))
            raise OSError(f"rank {missing} has not written its part to {part.folder}")
        time.sleep(_LOOK if waiting else 0)
    return entries


def _read(note: Path) -> dict[str, Entry]:
    said = json.loads(note.read_text(encoding="utf-8"))
    note.unlink()
    if "problem" in said:
        raise OSError(said["problem"])
    return {name: Entry(**entry) for name, entry in said["files"].items()}


class _Watch:
    """How long nothing in a folder has grown."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._bytes, self._since = folder, -1, time.monotonic()

    def idle(self) -> float:
        """Seconds since something was last seen to grow."""
        written = self._written()
        if written != self._bytes:
            self._bytes, self._since = written, time.monotonic()
        return time.monotonic() - self._since

    def _written(self) -> int:
        with contextlib.suppress(OSError):
            return sum(path.stat().st_size for path in self._folder.rglob("*"))
        return self._bytes
