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
from paceline.spec.training.checkpoint_manifest import FileEntry, Manifest
from paceline.train import files
from paceline.train.checkpoints.capture import Copier, Snapshot, TornSnapshot
from paceline.train.checkpoints.format import (
    FROZEN,
    STATE,
    Files,
    hash_and_size,
    tensor_bytes,
    write_chunks,
    write_tensors,
)
from paceline.train.checkpoints.store import Fenced, Store

_RESERVED_BYTES = 1 << 20  # for manifest, pointers and the file system's own needs
STALL_TIMEOUT_S = 60.0  # seconds in which nothing at all is written
FAILED_TIMEOUT_S = 5.0  # the same when the training has failed and other ranks may be gone
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """Result of a save.

    Attributes:
        problem: Why there is no checkpoint; empty if there is one.
        fenced: Another writer took over.
        is_torn: The script changed the model while it was copied; the next save can succeed.
    """

    step: int
    seconds: float
    bytes: int
    problem: str = ""
    fenced: bool = False
    is_torn: bool = False


class Writer:
    """Writes one checkpoint at a time into a store.

    Args:
        keep: How many of the newest stay; 0 keeps all.
        on_published: Called by the thread after each checkpoint that is there.

    Attributes:
        copier: Its ``wait`` returns when parameters may change again.
        outcomes: How the saves ended, in their order.
    """

    def __init__(
        self, store: Store, keep: int, on_published: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._keep, self._on_published = store, keep, on_published
        self.copier = Copier()
        self.outcomes: queue.SimpleQueue[SaveOutcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned = threading.Event()

    def start(self, snapshot: Snapshot, part: PartialWrite | None = None) -> None:
        """Starts to write, after the previous write has ended; ``part`` if every rank writes."""
        self.wait()
        finish = self.copier.start(snapshot.tensors, snapshot.deferred)
        self._thread = threading.Thread(
            target=self._work,
            args=(snapshot, finish, part),
            name="paceline-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(
        self, snapshot: Snapshot, finish: Callable[[], Files], part: PartialWrite | None
    ) -> None:
        started, problem, fenced, is_torn = time.monotonic(), "", False, False
        self._linked_bytes = 0  # bytes that an earlier checkpoint has
        try:
            tensors = finish()
            if part is not None and part.rank:
                write_part(part, lambda: self._write_files(snapshot, tensors, part.folder))
            else:
                self._write(snapshot, tensors, part)
        except Fenced as error:
            problem, fenced = f"{error.message} ({error.found})", True
        except Exception as error:  # whatever it is, it ends no training
            problem = str(error) or type(error).__name__
            is_torn = isinstance(error, TornSnapshot)
        seconds = time.monotonic() - started
        written = snapshot.bytes - self._linked_bytes
        outcome = SaveOutcome(snapshot.step, seconds, written, problem, fenced, is_torn)
        self.outcomes.put(outcome)

    def _write(self, snapshot: Snapshot, tensors: Files, part: PartialWrite | None) -> None:
        """Writes what is this process's, waits for other ranks' parts, and publishes."""
        tensors, frozen = _name_frozen(tensors)
        shared = sum(e.bytes for name, e in frozen.items() if self._store.find_file(name, e))
        folder = part.folder if part else self.make_folder(snapshot.step, snapshot.bytes - shared)
        try:
            entries = self._write_files(snapshot, tensors, folder, frozen)
            entries[STATE] = FileEntry(*write_chunks(folder / STATE, iter([snapshot.state])))
            if part is not None:
                entries |= collect_parts(part, self._abandoned)
            self._store.publish(folder, Manifest(snapshot.step, entries, snapshot.info))
        except OSError:
            self._store.check_not_fenced()  # a newer writer may have cleared our folder away
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._on_published()
        self._store.prune(self._keep)

    def _write_files(self, snapshot: Snapshot, tensors: Files, folder: Path,
                     frozen: Mapping[str, FileEntry] = {}) -> dict[str, FileEntry]:  # fmt: skip
        """Writes the files, but for those of ``frozen`` that an earlier checkpoint has, too."""
        entries = {}
        for name, content in tensors.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            if name in frozen and self._store.link(name, frozen[name], path):
                entries[name], self._linked_bytes = frozen[name], tensor_bytes(content)
            else:
                entries[name] = FileEntry(*write_tensors(path, content, snapshot.headers.get(name)))
        for parent in {(folder / name).parent for name in tensors} - {folder}:
            files.sync_folder(parent)
        return entries

    def make_folder(self, step: int, needed: int) -> Path:
        """Makes an empty folder for a checkpoint of ``needed`` bytes; OSError without room."""
        self._store.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._store.root).free
        if free < needed + _RESERVED_BYTES:
            raise OSError(
                f"the disk of {self._store.root} is too full:"
                f" {needed / 1e6:.1f} MB needed besides the {_RESERVED_BYTES / 1e6:.0f} MB that"
                f" checkpoints leave, {free / 1e6:.1f} MB free"
            )
        return self._store.temporary(step)

    def abandon(self) -> None:
        """Stops waiting for other ranks' parts: they may be gone."""
        self._abandoned.set()


def _name_frozen(tensors: Files) -> tuple[Files, dict[str, FileEntry]]:
    """Names the frozen weights' file by its content; returns the files and that entry.

    The content decides whether they have changed: not every change of a tensor leaves a trace.
    """
    if FROZEN not in tensors:
        return tensors, {}
    entry = FileEntry(*hash_and_size(tensors[FROZEN]))
    name = frozen_file(entry.sha256)
    renamed = {name if file == FROZEN else file: content for file, content in tensors.items()}
    return renamed, {name: entry}


@dataclass(frozen=True, slots=True)
class PartialWrite:
    """A rank's part in a checkpoint of all ranks, in a temporary folder that all of them see."""

    folder: Path
    rank: int
    size: int

    def note(self, rank: int) -> Path:
        """Returns the path of a rank's note about what it has written."""
        return self.folder / f".part-{rank}.json"


def write_part(part: PartialWrite, write: Callable[[], Mapping[str, FileEntry]]) -> None:
    """Writes this rank's files and a note about them, or about a failure, which it raises."""
    try:
        entries = {name: asdict(entry) for name, entry in write().items()}
    except Exception as error:
        with contextlib.suppress(OSError):
            files.write_json(part.note(part.rank), {"problem": f"rank {part.rank}: {error}"})
        raise
    files.write_json(part.note(part.rank), {"files": entries})


def collect_parts(part: PartialWrite, is_abandoned: threading.Event) -> dict[str, FileEntry]:
    """Waits for the other ranks' notes and removes them; returns what they have written.

    Args:
        is_abandoned: Set when other ranks may be gone.

    Raises:
        OSError: A rank could not write, or nothing was written for :data:`STALL_TIMEOUT_S`.
    """
    entries: dict[str, FileEntry] = {}
    pending = set(range(1, part.size))
    written, grown_at = -1, time.monotonic()
    while pending:
        for rank in [rank for rank in pending if part.note(rank).exists()]:
            entries |= _read_note(part.note(rank))
            pending.remove(rank)
        folder_bytes = _folder_bytes(part.folder)
        if folder_bytes not in (-1, written):  # -1: it cannot be read at present
            written, grown_at = folder_bytes, time.monotonic()
        timeout_s = FAILED_TIMEOUT_S if is_abandoned.is_set() else STALL_TIMEOUT_S
        if pending and time.monotonic() - grown_at > timeout_s:
            missing = ", ".join(map(str, sorted(pending)))
            raise OSError(f"rank {missing} has not written its part to {part.folder}")
        time.sleep(_POLL_S if pending else 0)
    return entries


def _read_note(note: Path) -> dict[str, FileEntry]:
    content = json.loads(files.read_bytes_limited(note))
    note.unlink()
    if "problem" in content:
        raise OSError(content["problem"])
    return {name: FileEntry(**entry) for name, entry in content["files"].items()}


def _folder_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):  # a file was renamed meanwhile
        return sum(path.stat().st_size for path in folder.rglob("*"))
    return -1
