"""Writing checkpoints in a thread: the training pays for the copy at most.

Where several ranks write one checkpoint into one folder they say nothing over the network: every
rank writes its files and then a note with their hashes; rank 0 waits for all notes and publishes
the checkpoint. So the training never waits for a disk.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.spec.rundir import frozen_file
from paceline.train import files
from paceline.train.checkpoints.capture import Copier, Snapshot
from paceline.train.checkpoints.format import (
    FROZEN,
    STATE,
    Entry,
    Files,
    Manifest,
    content_of,
    size_of,
    write_chunks,
    write_tensors,
)
from paceline.train.checkpoints.store import Fenced, Store

_SPARE = 1 << 20  # for manifest, pointers and the file system's own needs
PATIENCE = 60.0  # seconds in which nothing at all is written
LAST_SECONDS = 5.0  # the same when the training has failed and other ranks may be gone
_LOOK = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a save ended: ``problem`` is empty when it went well.

    ``fenced``: another writer has taken over, which is the end of this one.
    """

    step: int
    seconds: float
    bytes: int
    problem: str = ""
    fenced: bool = False


class Writer:
    """Writes one checkpoint at a time into a store.

    Args:
        store: Where.
        keep: How many of the newest stay; 0 keeps all.
        published: Called by the thread after each checkpoint that is there.

    Attributes:
        copier: Its ``wait`` returns when parameters may change again.
        outcomes: How the saves ended, in their order.
    """

    def __init__(
        self, store: Store, keep: int, published: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._keep, self._published = store, keep, published
        self.copier = Copier()
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()

    def begin(self, snapshot: Snapshot, part: Part | None = None) -> None:
        """Begins to write; waits first for the one before.

        Args:
            snapshot: What this process writes.
            part: Set where every rank writes what it holds.
        """
        self.wait()
        finish = self.copier.begin(snapshot.tensors, snapshot.later)
        self._thread = threading.Thread(
            target=self._work,
            args=(snapshot, finish, part),
            name="paceline-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self, snapshot: Snapshot, finish: Callable[[], Files], part: Part | None) -> None:
        started, problem, fenced = time.monotonic(), "", False
        self._shared = 0  # bytes that an earlier checkpoint has
        try:
            tensors = finish()
            if part is not None and part.rank:
                contribute(part, lambda: self._write_files(snapshot, tensors, part.folder))
            else:
                self._write(snapshot, tensors, part)
        except Fenced as error:
            problem, fenced = f"{error.message} ({error.found})", True
        except Exception as error:  # whatever it is, it ends no training
            problem = str(error) or type(error).__name__
        seconds = time.monotonic() - started
        written = snapshot.bytes - self._shared
        self.outcomes.put(Outcome(snapshot.step, seconds, written, problem, fenced))

    def _write(self, snapshot: Snapshot, tensors: Files, part: Part | None) -> None:
        """Writes what is this process's, waits for other ranks' parts, and publishes."""
        tensors, frozen = _named_by_content(tensors)
        shared = sum(e.bytes for name, e in frozen.items() if self._store.holder(name, e))
        folder = part.folder if part else self.prepare(snapshot.step, snapshot.bytes - shared)
        try:
            entries = self._write_files(snapshot, tensors, folder, frozen)
            entries[STATE] = Entry(*write_chunks(folder / STATE, iter([snapshot.state])))
            if part is not None:
                entries |= collect(part, self._given_up)
            self._store.publish(folder, Manifest(snapshot.step, entries, snapshot.about))
        except OSError:
            self._store.stand()  # a newer writer may have cleared our folder away
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._published()
        self._store.prune(self._keep)

    def _write_files(self, snapshot: Snapshot, tensors: Files, folder: Path,
                     frozen: Mapping[str, Entry] = {}) -> dict[str, Entry]:  # fmt: skip
        """Writes the files, but for those of ``frozen`` that an earlier checkpoint has, too."""
        entries = {}
        for name, content in tensors.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            if name in frozen and self._store.link(name, frozen[name], path):
                entries[name], self._shared = frozen[name], size_of(content)
            else:
                entries[name] = Entry(*write_tensors(path, content, snapshot.headers.get(name)))
        for parent in {(folder / name).parent for name in tensors} - {folder}:
            files.sync_folder(parent)
        return entries

    def prepare(self, step: int, needed: int) -> Path:
        """An empty folder for a checkpoint of ``needed`` bytes.

        Raises:
            OSError: There is no room, or no folder can be made.
        """
        self._store.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._store.root).free
        if free < needed + _SPARE:
            raise OSError(
                f"the disk of {self._store.root} is too full:"
                f" {needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free"
            )
        return self._store.temporary(step)

    def give_up(self) -> None:
        """Waits no longer for other ranks' parts: they may be gone."""
        self._given_up.set()


def _named_by_content(tensors: Files) -> tuple[Files, dict[str, Entry]]:
    """The files with the frozen weights' one named by its content, and what that one will be.

    The content decides whether they have changed: not every change of a tensor leaves a trace.
    """
    if FROZEN not in tensors:
        return tensors, {}
    entry = Entry(*content_of(tensors[FROZEN]))
    name = frozen_file(entry.sha256)
    return {name if file == FROZEN else file: one for file, one in tensors.items()}, {name: entry}


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
