"""Writing checkpoints in a thread: the training pays for the copy at most."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.train.checkpoints import tensorfile
from paceline.train.checkpoints.manifest import Entry, Manifest
from paceline.train.checkpoints.shelf import BEST, Shelf
from paceline.train.checkpoints.staging import Files, Staging

STATE = "state.json"
_SPARE = 1 << 20  # for manifest, pointers and the file system's own needs


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is to hold.

    Attributes:
        step: Global steps done.
        tensors: By file and name; still those of the training.
        at_once: Names of tensors that change before the next optimizer step.
        state: Content of ``state.json``, as bytes.
        about: For the manifest.
        best: True when it is the best so far.
    """

    step: int
    tensors: Files
    at_once: frozenset[str]
    state: bytes
    about: Mapping[str, Any]
    best: bool = False

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

    def begin(self, snapshot: Snapshot) -> None:
        """Begins to write; waits first for the one before."""
        self.wait()
        finish = self.staging.begin(snapshot.tensors, snapshot.at_once)
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
        self._check_space(snapshot.bytes)
        folder = self._shelf.temporary(snapshot.step)
        try:
            entries = {
                name: Entry(*tensorfile.write(folder / name, content))
                for name, content in tensors.items()
            }
            entries[STATE] = Entry(*tensorfile.write_chunks(folder / STATE, iter([snapshot.state])))
            self._shelf.publish(folder, Manifest(snapshot.step, entries, snapshot.about))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if snapshot.best:
            self._shelf.point(BEST, snapshot.step)
        self._shelf.prune(self._keep)

    def _check_space(self, needed: int) -> None:
        self._shelf.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._shelf.root).free
        if free < needed + _SPARE:
            raise OSError(
                f"the disk of {self._shelf.root} is too full:"
                f" {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free"
            )
