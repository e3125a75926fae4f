"""The folder of a run's checkpoints: what is there, what is newest, what may go."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from paceline.train import files
from paceline.train.checkpoints import manifest
from paceline.train.checkpoints.manifest import Damaged, Manifest

FOLDER = "checkpoints"
LATEST, BEST = "latest.json", "best.json"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint by its manifest; its files are not looked at yet."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True, slots=True)
class Shelf:
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
                good.append(Found(path, manifest.read(path)))
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

    def temporary(self, step: int) -> Path:
        """An empty folder in which a checkpoint can be made."""
        path = self.root / f".{step}.{os.getpid()}.tmp"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def publish(self, made: Path, one: Manifest) -> Path:
        """Turns a finished folder into the checkpoint of its step, at once or not at all."""
        files.write_bytes(made / manifest.NAME, one.encode())
        target = self.root / str(one.step)
        aside = self.root / f".{one.step}.replaced.tmp"
        if target.exists():  # of an attempt that was given up, or damaged
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        made.rename(target)
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
            (self.root / str(step)).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        for left in self.root.glob(".*.tmp"):
            if left.is_dir() and left.suffixes[-2:-1] != [f".{os.getpid()}"]:
                shutil.rmtree(left, ignore_errors=True)


def surplus(steps: Collection[int], keep: int, protected: Collection[int | None]) -> list[int]:
    """Which steps go: all but the newest ``keep`` and the protected ones; ``keep`` 0 keeps all."""
    if not keep:
        return []
    return [step for step in sorted(steps, reverse=True)[keep:] if step not in protected]
