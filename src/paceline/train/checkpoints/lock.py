"""One writer for each folder: a lock that says whose it is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.rundir import WRITER

STALE_SECONDS = 60.0  # without a sign of life from another machine
SIGN_SECONDS = 2.0  # between two signs of life
WATCH_SECONDS = 6.0  # for a sign of one whose launcher is known to be gone


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
    """Held while the process lives: the kernel's lock where it reaches, a sign of life elsewhere.

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
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._alive_elsewhere(descriptor):
                raise BlockingIOError
        except BlockingIOError:
            owner = _read(descriptor)
            os.close(descriptor)
            raise self._refused(owner) from None
        self._descriptor = descriptor
        self._write(descriptor)

    def _alive_elsewhere(self, descriptor: int) -> bool:
        """A holder on a machine that the kernel's lock does not reach."""
        owner = _read(descriptor)
        if (
            owner is None
            or owner.host == socket.gethostname()
            or (owner.run and owner.run == self._run)
        ):
            return False
        seen = os.fstat(descriptor).st_mtime
        if time.time() - seen >= STALE_SECONDS:
            return False
        return not (owner.run and self._launched_here()) or self._gives_a_sign(seen)

    def _launched_here(self) -> bool:
        """Our launcher holds the whole run directory: that of any earlier run there is gone."""
        ours = os.environ.get(jobenv.RUN_DIR)
        return bool(self._run and ours) and Path(str(ours)) == self._path.parent.parent

    def _gives_a_sign(self, seen: float) -> bool:
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
        """The sign of life; cheap enough for every step."""
        now = time.monotonic()
        if self._descriptor is not None and now >= self._refresh_at:
            self._refresh_at = now + SIGN_SECONDS
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """Gives the folder free."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


def _read(descriptor: int) -> Owner | None:
    try:
        said: Any = json.loads(os.pread(descriptor, 4096, 0))
        return Owner(**said)
    except (ValueError, TypeError):
        return None
