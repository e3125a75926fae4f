"""A run's folder of checkpoints: what is there, what is newest, what may go, and who writes.

Who writes is kept apart by three things. A lock refuses a second job at its start. Where a lock
does not reach (a host that is cut off, a process that was stopped for minutes, a disk without
locks) each writer has a token, larger than all that were there before it, and publishes nothing
once a larger one is there. And for a writer that was stopped between that look and the renaming,
every name has its writer's token in it: what it makes late stands beside what others have made, as
older than all of that, and what it removes late is nobody else's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import time
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.spec import jobenv
from paceline.spec.errors import JobError, SettingError
from paceline.spec.rundir import (
    BEST,
    CHECKPOINTS,
    LATEST,
    MAX_TOKEN,
    WRITER,
    Version,
    checkpoint_name,
    expired,
    parse_version,
    read_pointer,
    resembles_checkpoint,
)
from paceline.train import files
from paceline.train.checkpoints.format import (
    MANIFEST,
    Damaged,
    Entry,
    Manifest,
    read_manifest,
)

WANTS = ("auto", "never", "latest", "best")
"""What may be asked for besides a step and a folder."""

STALE_SECONDS = 60.0  # without a heartbeat from another host
BEAT_SECONDS = 2.0  # between two heartbeats
WATCH_SECONDS = 6.0  # for a heartbeat of one whose launcher is known to be gone


_LOOK = ".look-"  # and a writer's token and process: a name that is there for a moment
_CLAIM = ".token-"  # and a writer's token: the name of a file that says who has it
_CLAIMED = re.compile(re.escape(_CLAIM) + r"([1-9][0-9]{0,5})")
_MAKING = re.compile(r"\.[0-9]+\.([0-9]+)\.([0-9]+)\.tmp")  # step, token, process


class Fenced(JobError):
    """A newer writer has taken the folder over: nothing more is published by this one."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint by its manifest; its files are not looked at yet."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def is_whole(self) -> bool:
        """Whether its files are there with their sizes; their content is not looked at."""
        with contextlib.suppress(OSError):
            files = self.manifest.files.items()
            return all((self.path / name).stat().st_size == one.bytes for name, one in files)
        return False

    @property
    def version(self) -> Version:
        """What is newer is larger; of a folder that somebody has named, only its step counts."""
        named = parse_version(self.path.name)
        return (named[0] if named else 0), self.manifest.step


@dataclass(slots=True)
class Store:
    """All checkpoints of a run.

    Attributes:
        root: The folder that holds them.
        token: Of this writer.
    """

    root: Path
    token: int = 1

    def found(self) -> tuple[list[Found], list[str]]:
        """Checkpoints, newest first, and what was passed over with the reason."""
        good, bad = [], []
        for path in self._folders():
            if resembles_checkpoint(path.name):
                bad.append(f"{path}: no run makes a checkpoint of that number")
                continue
            try:
                good.append(Found(path, read_manifest(path)))
            except Damaged as problem:
                bad.append(f"{path}: {problem}")
        return sorted(good, key=lambda one: one.version, reverse=True), bad

    def _folders(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [
                one
                for one in self.root.iterdir()
                if (parse_version(one.name) or resembles_checkpoint(one.name)) and one.is_dir()
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
            best = self.best(found)
            return ([best] if best else []), bad
        if want.isdecimal():
            return [one for one in found if one.step == int(want)], bad
        return found, bad

    def best(self, found: Iterable[Found]) -> Found | None:
        """Of these the one that was made last of a best state."""
        named = read_pointer(self.root / BEST)
        said = [o for o in found if o.path.name == named or o.manifest.about.get("best") is True]
        return max(said, key=lambda one: one.version, default=None)

    def holder(self, name: str, entry: Entry) -> Path | None:
        """This very file in an earlier checkpoint, by its manifest."""
        holders = (one for one in self.found()[0] if one.manifest.files.get(name) == entry)
        return next((one.path / name for one in holders), None)

    def link(self, name: str, entry: Entry, target: Path) -> bool:
        """Makes ``target`` a hard link to this file of an earlier checkpoint, if it can."""
        if (path := self.holder(name, entry)) is not None:
            with contextlib.suppress(OSError):  # pruned meanwhile, or a disk without links
                os.link(path, target)
                return True
        return False

    # -- who writes ----------------------------------------------------------------------

    def newest_token(self) -> int:
        """The largest that anybody here has, or has left behind; 0 in a new folder."""
        with contextlib.suppress(OSError):
            return max((_token_of(one.name) for one in self.root.iterdir()), default=0)
        return 0

    def claim(self, above: int, who: str) -> None:
        """Takes a token that is larger than any here and than ``above``: a former writer is out.

        Args:
            above: The largest that is known of, here or elsewhere.
            who: Who has it now, for people.

        Raises:
            OSError: The disk takes no more names.
            SettingError: There is no larger one.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        token = max(above, self.newest_token())
        while True:
            token += 1
            if token > MAX_TOKEN:
                raise SettingError(
                    f"{self.root} has checkpoints of writer {token - 1}: no later one can follow",
                    remedy="Move what no run of yours has made out of the folder",
                )
            mine = self.root / f"{_CLAIM}{token}"
            with contextlib.suppress(FileExistsError):  # another one has come first
                descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                break
        try:
            with contextlib.suppress(OSError):  # a full disk: the name alone counts
                os.write(descriptor, who.encode())
        finally:
            os.close(descriptor)
        files.sync_folder(self.root)
        self.token = token
        for one in self.root.glob(f"{_CLAIM}*"):
            if _token_of(one.name) < token:
                one.unlink(missing_ok=True)

    def stand(self) -> None:
        """Returns where nobody has taken the folder over since :meth:`claim`.

        Raises:
            Fenced: Somebody has; says who.
        """
        look = self.root / self._look
        with contextlib.suppress(OSError):  # a name of our own has a network disk list anew
            look.touch()
            look.unlink()
        newest = self.newest_token()
        if newest > self.token:
            who = ""
            with contextlib.suppress(OSError, ValueError):
                who = files.read_small(self.root / f"{_CLAIM}{newest}").decode()[:300]
            raise Fenced(
                f"another writer has taken over {self.root}",
                found=who or f"its token is {newest}, ours {self.token}",
                remedy="nothing, if this is what is left of an earlier start; else give each job"
                " a --run-dir of its own",
            )

    @property
    def _look(self) -> str:
        return f"{_LOOK}{self.token}-{os.getpid()}"

    # -- writing -------------------------------------------------------------------------

    def temporary(self, step: int) -> Path:
        """An empty folder in which a checkpoint can be made."""
        path = self.root / f".{step}.{self.token}.{os.getpid()}.tmp"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def demand_own(self, folder: Path) -> None:
        """JobError unless a folder that a rank names is one to make a checkpoint here."""
        with contextlib.suppress(OSError):
            if _MAKING.fullmatch(folder.name) and folder.parent.samefile(self.root):
                return
        raise JobError(f"{folder} is no place for a checkpoint in {self.root}, and rank 0 named it")

    def publish(self, made: Path, one: Manifest) -> Path:
        """Turns a finished folder into the checkpoint of its step, at once or not at all.

        Raises:
            Fenced: A newer writer is there.
        """
        files.write_bytes(made / MANIFEST, one.encode())
        self.stand()
        # From here on a newer writer may come at any moment: only names with our token are touched.
        return self.place(made, (self.token, one.step), best=one.about.get("best") is True)

    def place(self, made: Path, version: Version, *, best: bool) -> Path:
        """Gives a whole folder its name and notes it; a former one of that name goes."""
        name = checkpoint_name(version)
        target, aside = self.root / name, self.root / f".{name}.replaced.tmp"
        if target.exists():  # the same state, which turned out to be the best
            shutil.rmtree(aside, ignore_errors=True)
            files.replace(target, aside)
        files.replace(made, target)
        files.sync_folder(self.root)
        shutil.rmtree(aside, ignore_errors=True)
        self.point(LATEST, version)
        if best:
            self.point(BEST, version)
        return target

    def point(self, name: str, version: Version) -> None:
        """Notes a checkpoint for people and for what is done with the best; only ever forward."""
        known = parse_version(read_pointer(self.root / name))
        if known is None or known < version:
            about = {"step": version[1], "checkpoint": checkpoint_name(version)}
            files.write_json(self.root / name, about)

    def prune(self, keep: int) -> None:
        """Removes all but the newest ``keep`` and the best; and what a killed writer left."""
        found, _ = self.found()
        best = self.best(found)
        if best is not None:  # a former writer may have noted its own, late
            self.point(BEST, best.version)
        whole = [one.version for one in found if one.is_whole]
        newest = sorted(whole, reverse=True)[:keep]
        over = expired(whole, keep, {best.version if best else None})
        if len(newest) == keep:  # else what is not whole may be all that somebody has
            over += [o.version for o in found if not o.is_whole and o.version < newest[-1]]
        for version in over:
            if version[0] > self.token:  # somebody else's now
                continue
            # Under this name it is no checkpoint any more, however far the removal comes.
            name = checkpoint_name(version)
            gone = self.root / f".{name}.gone.tmp"
            # Somebody reads it: next time. Or a fenced writer was removing it at the same moment.
            with contextlib.suppress(PermissionError, FileNotFoundError):
                files.replace(self.root / name, gone)
            shutil.rmtree(gone, ignore_errors=True)
        for left in self.root.glob(".*.tmp"):
            if not left.is_dir():
                files.clear(left)
            elif not self._under_way(left.name):
                shutil.rmtree(left, ignore_errors=True)
        for left in self.root.glob(f"{_LOOK}*"):
            if left.name != self._look:
                left.unlink(missing_ok=True)

    def _under_way(self, name: str) -> bool:
        """Whether it is a folder in which we, or a newer writer, make a checkpoint now."""
        made = _MAKING.fullmatch(name)
        if made is None:
            return False
        ours = int(made[1]) == self.token and int(made[2]) == os.getpid()
        return ours or int(made[1]) > self.token


def _token_of(name: str) -> int:
    """Of a checkpoint's folder or of a claim; 0 of any other name."""
    version = parse_version(name)
    if version is not None:
        return version[0]
    claimed = _CLAIMED.fullmatch(name)
    return int(claimed[1]) if claimed else 0


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

    Attributes:
        held: This process may write, as far as the lock says.
    """

    def __init__(self, folder: Path, run: str = "") -> None:
        self._path = folder / WRITER
        self._run = run
        self._descriptor: int | None = None
        self._locked = False  # by the kernel, too
        self._refresh_at = 0.0

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def take(self, *, over: bool = False) -> None:
        """Takes the lock.

        A holder whose end is known, or who gives no sign of life, may still have the kernel's lock:
        it is frozen, on its way out, or on a host that a server of files has not given up yet. It
        is taken over: its token keeps it from publishing anything later.

        Args:
            over: The launcher has said that this process writes now.

        Raises:
            SettingError: Another job writes there; says which.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            self._locked = files.lock(descriptor) is not False
            refused = self._alive_elsewhere if self._locked else self._alive_with_lock
            if not over and refused(descriptor):
                raise self._refused(_owner(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _TAKEN.add(self)
        self._write(descriptor)

    def _alive_with_lock(self, descriptor: int) -> bool:
        """A holder of the kernel's lock that must be believed to write."""
        owner = _owner(descriptor)
        if owner is None or not owner.run:
            return True
        ended = owner.run == self._run or self._launched_here()
        return not ended or self._beats(os.fstat(descriptor).st_mtime)

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
        if self._now() - seen >= STALE_SECONDS:
            return False
        return not (owner.run and self._launched_here()) or self._beats(seen)

    def _now(self) -> float:
        """By the clock that heartbeats are set by, which need not be this host's."""
        probe = self._path.with_name(f"{_LOOK}0-{secrets.token_hex(8)}")
        try:
            probe.touch()
            try:
                return probe.stat().st_mtime
            finally:
                probe.unlink()
        except OSError:  # the disk takes no more names
            return time.time()

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
        with contextlib.suppress(OSError):  # of SMB, while a former writer holds the kernel's lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(self.owner)).encode(), 0)

    @property
    def owner(self) -> Owner:
        """This process."""
        return Owner(socket.gethostname(), os.getpid(), time.strftime("%F %T"), self._run)

    def refresh(self) -> None:
        """The heartbeat; cheap enough for every step."""
        now = time.monotonic()
        if self._descriptor is not None and now >= self._refresh_at:
            self._refresh_at = now + BEAT_SECONDS
            with contextlib.suppress(OSError):
                self._locked = self._locked or files.lock(self._descriptor) is not False
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
    # a share of SMB lets nobody read a locked file
    except (ValueError, TypeError, OSError, RecursionError):
        return None
