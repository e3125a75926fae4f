"""A run's folder of checkpoints: what is there, what is newest, what may go, and who writes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import weakref
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.rundir import CHECKPOINTS, WRITER
from paceline.train import files
from paceline.train.checkpoints.format import MANIFEST, Damaged, Manifest, read_manifest

LATEST, BEST = "latest.json", "best.json"

WANTS = ("auto", "never", "latest", "best")
"""What may be asked for besides a step and a folder."""

STALE_SECONDS = 60.0  # without a heartbeat from another host
BEAT_SECONDS = 2.0  # between two heartbeats
WATCH_SECONDS = 6.0  # for a heartbeat of one whose launcher is known to be gone


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint by its manifest; its files are not looked at yet."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True, slots=True)
class Store:
    """All checkpoints of a run.

    Attributes:
        root: The folder that holds them.
    """

    root: Path

    def found(self) -> tuple[list[Found], list[str]]:
        """Checkpoints, newest first, and what was passed over with the reason."""
        good, bad = [], []
        for path in self._folders():
            try:
                good.append(Found(path, read_manifest(path)))
            except Damaged as problem:
                bad.append(f"{path}: {problem}")
        return sorted(good, key=lambda one: one.step, reverse=True), bad

    def _folders(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [
                path
                for path in self.root.iterdir()
                if path.name.isdecimal() and len(path.name) < 20 and path.is_dir()
            ]
        return []

    def wanted(self, want: str) -> tuple[list[Found], list[str]]:
        """What this disk offers, best choice first, and what it had to pass over.

        Args:
            want: ``auto`` or ``latest``, ``best``, a step, or the folder of a checkpoint or a run.
        """
        if want not in WANTS and not want.isdecimal():
            return _at(Path(want).expanduser())
        found, bad = self.found()
        if want == "best":
            best = self.pointed(BEST)
            return [one for one in found if one.step == best], bad
        if want.isdecimal():
            return [one for one in found if one.step == int(want)], bad
        return found, bad

    def temporary(self, step: int) -> Path:
        """An empty folder in which a checkpoint can be made."""
        path = self.root / f".{step}.{os.getpid()}.tmp"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def publish(self, made: Path, one: Manifest) -> Path:
        """Turns a finished folder into the checkpoint of its step, at once or not at all."""
        files.write_bytes(made / MANIFEST, one.encode())
        target = self.root / str(one.step)
        aside = self.root / f".{one.step}.replaced.tmp"
        if target.exists():  # of an attempt that was given up, or damaged
            shutil.rmtree(aside, ignore_errors=True)
            files.replace(target, aside)
        files.replace(made, target)
        files.sync_folder(self.root)
        shutil.rmtree(aside, ignore_errors=True)
        self.point(LATEST, one.step)
        return target

    def point(self, name: str, step: int) -> None:
        """Notes a step for people and for ``best``; ``latest`` never relies on it."""
        files.write_json(self.root / name, {"step": step})

    def pointed(self, name: str) -> int | None:
        """The step that was noted."""
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError
        ):
            return int(json.loads((self.root / name).read_text())["step"])
        return None

    def prune(self, keep: int) -> None:
        """Removes all but the newest ``keep`` and the best; and what a killed writer left."""
        found, _ = self.found()
        for step in surplus([one.step for one in found], keep, {self.pointed(BEST)}):
            # Under this name it is no checkpoint any more, however far the removal comes.
            gone = self.root / f".{step}.gone.tmp"
            with contextlib.suppress(PermissionError):  # somebody reads it: next time
                files.replace(self.root / str(step), gone)
            shutil.rmtree(gone, ignore_errors=True)
        for left in self.root.glob(".*.tmp"):
            if left.is_dir() and left.suffixes[-2:-1] != [f".{os.getpid()}"]:
                shutil.rmtree(left, ignore_errors=True)


def _at(path: Path) -> tuple[list[Found], list[str]]:
    """The checkpoints of a run's folder, or the one that the folder is."""
    for root in (path / CHECKPOINTS, path):
        found, bad = Store(root).found()
        if found or bad:
            return found, bad
    try:
        return [Found(path, read_manifest(path))], []
    except Damaged as problem:
        return [], [f"{path}: {problem}"]


def surplus(steps: Collection[int], keep: int, protected: Collection[int | None]) -> list[int]:
    """Which steps go: all but the newest ``keep`` and the protected ones; ``keep`` 0 keeps all."""
    if not keep:
        return []
    return [step for step in sorted(steps, reverse=True)[keep:] if step not in protected]


@dataclass(frozen=True, slots=True)
class Owner:
    """Who writes into a folder."""

    host: str
    pid: int
    since: str
    run: str

    def describe(self) -> str:
        """For people."""
        run = f", run {self.run}" if self.run else ""
        return f"process {self.pid} on {self.host}, since {self.since}{run}"


class Lock:
    """Held while the process lives: the kernel's lock where it reaches, heartbeats elsewhere.

    Args:
        folder: The folder to be written to.
        run: Identity of the job; a later attempt of the same job takes the lock over.
    """

    def __init__(self, folder: Path, run: str = "") -> None:
        self._path = folder / WRITER
        self._run = run
        self._descriptor: int | None = None
        self._refresh_at = 0.0

    def take(self) -> None:
        """Takes the lock.

        Raises:
            SettingError: Another job writes there; says which.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            if files.lock(descriptor) is False or self._alive_elsewhere(descriptor):
                raise self._refused(_owner(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _TAKEN.add(self)
        self._write(descriptor)

    def _alive_elsewhere(self, descriptor: int) -> bool:
        """A holder on a host that the kernel's lock does not reach."""
        owner = _owner(descriptor)
        if (
            owner is None
            or owner.host == socket.gethostname()
            or (owner.run and owner.run == self._run)
        ):
            return False
        seen = os.fstat(descriptor).st_mtime
        if time.time() - seen >= STALE_SECONDS:
            return False
        return not (owner.run and self._launched_here()) or self._beats(seen)

    def _launched_here(self) -> bool:
        """Our launcher holds the whole run directory: that of any earlier run there is gone."""
        ours = os.environ.get(jobenv.RUN_DIR)
        return bool(self._run and ours) and Path(str(ours)) == self._path.parent.parent

    def _beats(self, seen: float) -> bool:
        """Whether the holder is alive after all: its ranks may be on their way out."""
        deadline = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < deadline:
            time.sleep(WATCH_SECONDS / 20)
            with contextlib.suppress(OSError), self._path.open("rb") as again:  # not a cached one
                if os.fstat(again.fileno()).st_mtime != seen:
                    return True
        return False

    def _refused(self, owner: Owner | None) -> SettingError:
        return SettingError(
            f"another job writes to {self._path.parent}",
            found=owner.describe() if owner else "its owner could not be read",
            remedy="give this job a --run-dir of its own, or wait until the other has ended",
        )

    def _write(self, descriptor: int) -> None:
        mine = Owner(socket.gethostname(), os.getpid(), time.strftime("%F %T"), self._run)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(mine)).encode(), 0)

    def refresh(self) -> None:
        """The heartbeat; cheap enough for every step."""
        now = time.monotonic()
        if self._descriptor is not None and now >= self._refresh_at:
            self._refresh_at = now + BEAT_SECONDS
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def leave(self) -> None:
        """In a fork of the process: the lock is not this one's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def release(self) -> None:
        """Gives the folder free."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


_TAKEN: weakref.WeakSet[Lock] = weakref.WeakSet()


def _leave_all() -> None:
    """A loader's worker outlives a killed rank by seconds, and would hold its lock so long."""
    for one in list(_TAKEN):
        one.leave()


os.register_at_fork(after_in_child=_leave_all)


def _owner(descriptor: int) -> Owner | None:
    try:
        said: Any = json.loads(os.pread(descriptor, 4096, 0))
        return Owner(**said)
    except (ValueError, TypeError, OSError):  # a share of SMB lets nobody read a locked file
        return None
