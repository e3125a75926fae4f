"""Writing checkpoints in a thread: the training pays for the copy at most."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.train import files
from paceline.train.checkpoints import parts, tensorfile
from paceline.train.checkpoints.manifest import Entry, Manifest
from paceline.train.checkpoints.names import STATE
from paceline.train.checkpoints.parts import Part
from paceline.train.checkpoints.shelf import BEST, Shelf
from paceline.train.checkpoints.staging import Files, Staging

_SPARE = 1 << 20  # for manifest, pointers and the file system's own needs


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is to hold.

    Attributes:
        step: Global steps done.
        tensors: By file and name; still those of the training.
        later: Names of tensors that do not change before the next optimizer step.
        state: Content of ``state.json``, as bytes.
        about: For the manifest.
        best: True when it is the best so far.
        headers: Texts for the headers of files, by file.
        part: Set where every rank writes what it holds.
    """

    step: int
    tensors: Files
    later: frozenset[str]
    state: bytes
    about: Mapping[str, Any]
    best: bool = False
    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    part: Part | None = None

    @property
    def bytes(self) -> int:
        """Size on disk, nearly."""
        return sum(map(tensorfile.size, self.tensors.values())) + len(self.state)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended: ``problem`` is empty when it went well."""

    step: int
    seconds: float
    bytes: int
    problem: str = ""


class Writer:
    """Writes one checkpoint at a time into a shelf.

    Args:
        shelf: Where.
        keep: How many of the newest stay; 0 keeps all.
    """

    def __init__(self, shelf: Shelf, keep: int) -> None:
        self._shelf, self._keep = shelf, keep
        self.staging = Staging()
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()

    def begin(self, snapshot: Snapshot) -> None:
        """Begins to write; waits first for the one before."""
        self.wait()
        finish = self.staging.begin(snapshot.tensors, snapshot.later)
        self._thread = threading.Thread(
            target=self._work, args=(snapshot, finish), name="paceline-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self, snapshot: Snapshot, finish: Callable[[], Files]) -> None:
        started = time.monotonic()
        problem = ""
        try:
            self._write(snapshot, finish())
        except Exception as error:  # whatever it is, it ends no training
            problem = str(error) or type(error).__name__
        seconds = time.monotonic() - started
        self.outcomes.put(Outcome(snapshot.step, seconds, snapshot.bytes, problem))

    def _write(self, snapshot: Snapshot, tensors: Files) -> None:
        part = snapshot.part
        if part is None:
            self._write_all(snapshot, tensors, self.prepare(snapshot.step, snapshot.bytes))
        elif part.rank:
            parts.contribute(part, lambda: _write_files(snapshot, tensors, part.folder))
        else:
            self._write_all(snapshot, tensors, part.folder)

    def _write_all(self, snapshot: Snapshot, tensors: Files, folder: Path) -> None:
        """Writes what is this process's, waits for other parts, and publishes."""
        try:
            entries = _write_files(snapshot, tensors, folder)
            entries[STATE] = Entry(*tensorfile.write_chunks(folder / STATE, iter([snapshot.state])))
            if snapshot.part is not None:
                entries |= parts.collect(snapshot.part, self._given_up)
            self._shelf.publish(folder, Manifest(snapshot.step, entries, snapshot.about))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if snapshot.best:
            self._shelf.point(BEST, snapshot.step)
        self._shelf.prune(self._keep)

    def prepare(self, step: int, needed: int) -> Path:
        """An empty folder for a checkpoint of ``needed`` bytes.

        Raises:
            OSError: There is no room, or no folder can be made.
        """
        self._shelf.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._shelf.root).free
        if free < needed + _SPARE:
            raise OSError(
                f"the disk of {self._shelf.root} is too full:"
                f" {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free"
            )
        return self._shelf.temporary(step)

    def give_up(self) -> None:
        """Waits no longer for other ranks' parts: they may be gone."""
        self._given_up.set()


def _write_files(snapshot: Snapshot, tensors: Files, folder: Path) -> dict[str, Entry]:
    entries = {}
    for name, content in tensors.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        entries[name] = Entry(*tensorfile.write(path, content, snapshot.headers.get(name)))
    for parent in {(folder / name).parent for name in tensors} - {folder}:
        files.sync_folder(parent)
    return entries
