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
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.spec import jobenv
from paceline.spec.errors import JobError, SettingError
from paceline.spec.rundir import (
    BEST,
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    MAX_TOKEN,
    SELECTORS,
    WRITER,
    Version,
    checkpoint_name,
    expired,
    parse_version,
    read_pointer,
    resembles_checkpoint,
)
from paceline.spec.training.checkpoint_manifest import (
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    sha256,
)
from paceline.train import files
from paceline.train.checkpoints.format import read_manifest

STALE_AFTER_S = 60.0  # without a heartbeat from another host
HEARTBEAT_S = 2.0  # between two heartbeats
WATCH_S = 6.0  # for a heartbeat of one whose launcher is known to be gone


_PROBE_PREFIX = ".look-"  # and a writer's token and process: a name that is there for a moment
_CLAIM_PREFIX = ".token-"  # and a writer's token: the name of a file that says who has it
_CLAIM_PATTERN = re.compile(re.escape(_CLAIM_PREFIX) + r"([1-9][0-9]{0,5})")
_TEMPORARY_PATTERN = re.compile(r"\.[0-9]+\.([0-9]+)\.([0-9]+)\.tmp")  # step, token, process


FENCED_REMEDY = (
    "nothing, if this is what is left of an earlier start; else give each job a --run-dir of its"
    " own"
)


class Fenced(JobError):
    """A newer writer owns the folder: this one publishes nothing more."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint known by its manifest; its files are not read yet."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def is_complete(self) -> bool:
        """Whether all files exist with their sizes; contents are not read."""
        with contextlib.suppress(OSError):
            files = self.manifest.files.items()
            return all((self.path / name).stat().st_size == entry.bytes for name, entry in files)
        return False

    @property
    def version(self) -> Version:
        """Token and step; newer is larger. Only the step counts in a renamed folder."""
        version = parse_version(self.path.name)
        return (version[0] if version else 0), self.manifest.step


@dataclass(slots=True)
class Store:
    """All checkpoints of a run."""

    root: Path
    token: int = 1

    def scan(self) -> tuple[list[StoredCheckpoint], list[str]]:
        """Returns checkpoints, newest first, and messages about those that were skipped."""
        checkpoints, skipped = [], []
        for path in self._folders():
            if resembles_checkpoint(path.name):
                skipped.append(f"{path}: no run makes a checkpoint of that number")
                continue
            try:
                checkpoints.append(StoredCheckpoint(path, read_manifest(path, path.name)))
            except DamagedCheckpoint as problem:
                skipped.append(f"{path}: {problem}")
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.version, reverse=True), skipped

    def _folders(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [
                path
                for path in self.root.iterdir()
                if (parse_version(path.name) or resembles_checkpoint(path.name)) and path.is_dir()
            ]
        return []

    def select(self, selector: str) -> tuple[list[StoredCheckpoint], list[str]]:
        """Returns what this disk offers, best choice first, and messages about skipped ones.

        Args:
            selector: ``auto`` or ``latest``, ``best``, a step, or a checkpoint's or a run's folder.
        """
        if selector not in SELECTORS and not selector.isdecimal():
            return _in_folder(Path(selector).expanduser())
        checkpoints, skipped = self.scan()
        if selector == "best":
            best_checkpoint = self.best_of(checkpoints)
            return ([best_checkpoint] if best_checkpoint else []), skipped
        if selector.isdecimal():
            step = int(selector)
            checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.step == step]
        return checkpoints, skipped

    def best_of(self, checkpoints: Iterable[StoredCheckpoint]) -> StoredCheckpoint | None:
        """Returns the latest of these that was the best when it was made."""
        pointer = read_pointer(self.root / BEST)
        candidates = [
            checkpoint
            for checkpoint in checkpoints
            if checkpoint.path.name == pointer or checkpoint.manifest.info.get("best") is True
        ]
        return max(candidates, key=lambda checkpoint: checkpoint.version, default=None)

    def find_file(self, name: str, entry: FileEntry) -> Path | None:
        """Returns the path of this file in an earlier checkpoint, by manifest."""
        for checkpoint in self.scan()[0]:
            if checkpoint.manifest.files.get(name) == entry:
                return checkpoint.path / name
        return None

    def link(self, name: str, entry: FileEntry, target: Path) -> bool:
        """Makes ``target`` a hard link to this file of an earlier checkpoint, if possible."""
        if (path := self.find_file(name, entry)) is not None:
            with contextlib.suppress(OSError):  # pruned meanwhile, or a disk without links
                os.link(path, target)
                return True
        return False

    # -- who writes ----------------------------------------------------------------------

    def highest_token(self) -> int:
        """Returns the largest token in the folder; 0 if there is none."""
        with contextlib.suppress(OSError):
            return max((_token_of(path.name) for path in self.root.iterdir()), default=0)
        return 0

    def claim_token(self, minimum: int, owner: str) -> None:
        """Claims a token above ``minimum`` and all present ones, which fences former writers.

        ``owner`` says who has it now, for people.

        Raises:
            OSError: The disk takes no more names.
            SettingError: There is no larger one.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        token = max(minimum, self.highest_token())
        while True:
            token += 1
            if token > MAX_TOKEN:
                raise SettingError(
                    f"{self.root} has checkpoints of writer {token - 1}: no later one can follow",
                    remedy="Move what no run of yours has made out of the folder",
                )
            path = self.root / f"{_CLAIM_PREFIX}{token}"
            with contextlib.suppress(FileExistsError):  # another one has come first
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                break
        try:
            with contextlib.suppress(OSError):  # a full disk: the name alone counts
                os.write(descriptor, owner.encode())
        finally:
            os.close(descriptor)
        files.sync_folder(self.root)
        self.token = token
        for claim_file in self.root.glob(f"{_CLAIM_PREFIX}*"):
            if _token_of(claim_file.name) < token:
                claim_file.unlink(missing_ok=True)

    def check_not_fenced(self) -> None:
        """Raises Fenced if somebody has claimed a newer token since :meth:`claim_token`."""
        probe = self.root / self._probe_name
        with contextlib.suppress(OSError):  # a name of our own has a network disk list anew
            probe.touch()
            probe.unlink()
        highest = self.highest_token()
        if highest > self.token:
            owner = ""
            with contextlib.suppress(OSError, ValueError):
                claim_file = self.root / f"{_CLAIM_PREFIX}{highest}"
                owner = files.read_bytes_limited(claim_file).decode()[:300]
            raise Fenced(
                f"another writer has taken over {self.root}",
                found=owner or f"its token is {highest}, ours {self.token}",
                remedy=FENCED_REMEDY,
            )

    @property
    def _probe_name(self) -> str:
        return f"{_PROBE_PREFIX}{self.token}-{os.getpid()}"

    # -- writing -------------------------------------------------------------------------

    def temporary(self, step: int) -> Path:
        """Makes an empty folder for a checkpoint in progress."""
        path = self.root / f".{step}.{self.token}.{os.getpid()}.tmp"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def check_temporary(self, folder: Path) -> None:
        """Checks that a folder named by a rank may hold a checkpoint in progress here."""
        with contextlib.suppress(OSError):
            if _TEMPORARY_PATTERN.fullmatch(folder.name) and folder.parent.samefile(self.root):
                return
        raise JobError(f"{folder} is no place for a checkpoint in {self.root}, and rank 0 named it")

    def publish(self, folder: Path, manifest: Manifest) -> Path:
        """Turns a finished folder into the checkpoint of its step, atomically; may raise Fenced."""
        previous = self._predecessor((self.token, manifest.step))
        manifest = replace(manifest, info={**manifest.info, **previous})
        files.write_bytes(folder / MANIFEST, manifest.encode())
        self.check_not_fenced()
        # From here on a newer writer may come at any moment: only names with our token are touched.
        is_best = manifest.info.get("best") is True
        return self.install(folder, (self.token, manifest.step), is_best=is_best)

    def _predecessor(self, version: Version) -> dict[str, Any]:
        """Returns the entry of a manifest that names the newest earlier checkpoint here."""
        versions = filter(None, (parse_version(path.name) for path in self._folders()))
        earlier = max((other for other in versions if other < version), default=None)
        if earlier is not None:
            name = checkpoint_name(earlier)
            with contextlib.suppress(OSError):  # pruned meanwhile
                digest = sha256(self.root / name / MANIFEST)
                return {"previous": {"checkpoint": name, "sha256": digest}}
        return {}

    def install(self, folder: Path, version: Version, *, is_best: bool) -> Path:
        """Gives a finished folder its name and updates pointers; replaces one of that name."""
        name = checkpoint_name(version)
        target, replaced = self.root / name, self.root / f".{name}.replaced.tmp"
        if target.exists():  # the state before the evaluation, which may have found it the best
            shutil.rmtree(replaced, ignore_errors=True)
            files.replace(target, replaced)
        files.replace(folder, target)
        files.sync_folder(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        self.point(LATEST, version)
        if is_best:
            self.point(BEST, version)
        return target

    def point(self, name: str, version: Version) -> None:
        """Updates a pointer to a checkpoint; never to an older one."""
        former = parse_version(read_pointer(self.root / name))
        if former is None or former < version:
            pointer = {"step": version[1], "checkpoint": checkpoint_name(version)}
            files.write_json(self.root / name, pointer)

    def newest_and_best(self) -> set[Version]:
        """Returns the versions of the newest and the best complete checkpoint, if there are any."""
        complete = [checkpoint for checkpoint in self.scan()[0] if checkpoint.is_complete]
        chosen = [*complete[:1], self.best_of(complete)]
        return {checkpoint.version for checkpoint in chosen if checkpoint is not None}

    def prune(self, keep: int, protected: Collection[Version] = ()) -> None:
        """Removes all but the newest ``keep``, the best and the protected ones.

        Also removes leftovers of killed writers.
        """
        checkpoints, _ = self.scan()
        best_checkpoint = self.best_of(checkpoints)
        if best_checkpoint is not None:  # a former writer may have noted its own, late
            self.point(BEST, best_checkpoint.version)
        complete = [checkpoint.version for checkpoint in checkpoints if checkpoint.is_complete]
        retained = sorted(complete, reverse=True)[:keep]
        best_version = best_checkpoint.version if best_checkpoint else None
        obsolete = expired(complete, keep, {best_version, *protected})
        if len(retained) == keep:  # else what is not whole may be all that somebody has
            obsolete += [
                checkpoint.version
                for checkpoint in checkpoints
                if not checkpoint.is_complete and checkpoint.version < retained[-1]
            ]
        for version in obsolete:
            if version[0] > self.token:  # somebody else's now
                continue
            # Under this name it is no checkpoint any more, however far the removal comes.
            name = checkpoint_name(version)
            removed = self.root / f".{name}.gone.tmp"
            # Somebody reads it: next time. Or a fenced writer was removing it at the same moment.
            with contextlib.suppress(PermissionError, FileNotFoundError):
                files.replace(self.root / name, removed)
            shutil.rmtree(removed, ignore_errors=True)
        for leftover in self.root.glob(".*.tmp"):
            if not leftover.is_dir():
                files.remove_stale(leftover)
            elif not self._is_in_progress(leftover.name):
                shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.root.glob(f"{_PROBE_PREFIX}*"):
            if leftover.name != self._probe_name:
                leftover.unlink(missing_ok=True)

    def _is_in_progress(self, name: str) -> bool:
        """Whether this or a newer writer makes a checkpoint in this folder now."""
        match = _TEMPORARY_PATTERN.fullmatch(name)
        if match is None:
            return False
        is_own = int(match[1]) == self.token and int(match[2]) == os.getpid()
        return is_own or int(match[1]) > self.token


def _token_of(name: str) -> int:
    """Returns the token in the name of a checkpoint or claim; 0 for other names."""
    version = parse_version(name)
    if version is not None:
        return version[0]
    claimed = _CLAIM_PATTERN.fullmatch(name)
    return int(claimed[1]) if claimed else 0


def _in_folder(path: Path) -> tuple[list[StoredCheckpoint], list[str]]:
    """Returns the checkpoints of a run's folder, or the one that the folder is."""
    for root in (path / CHECKPOINTS, path):
        checkpoints, skipped = Store(root).scan()
        if checkpoints or skipped:
            return checkpoints, skipped
    try:
        return [StoredCheckpoint(path, read_manifest(path))], []
    except DamagedCheckpoint as problem:
        return [], [f"{path}: {problem}"]


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The process that writes into a folder."""

    host: str
    pid: int
    since: str
    run: str

    def describe(self) -> str:
        """Describes the owner to users."""
        run = f", run {self.run}" if self.run else ""
        return f"process {self.pid} on {self.host}, since {self.since}{run}"


class WriterLock:
    """Write lock of a folder: the kernel's lock if it reaches, heartbeats elsewhere.

    Args:
        run: Identity of the job; a later attempt of the same job takes the lock over.

    Attributes:
        is_held: This process may write, as far as the lock says.
    """

    def __init__(self, folder: Path, run: str = "") -> None:
        self._path = folder / WRITER
        self._run = run
        self._descriptor: int | None = None
        self._has_kernel_lock = False  # by the kernel, too
        self._refresh_at = 0.0

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def acquire(self, *, force: bool = False) -> None:
        """Takes the lock.

        A holder whose end is known, or who gives no sign of life, may still have the kernel's lock:
        it is frozen, on its way out, or on a host that a server of files has not given up yet. It
        is taken over: its token keeps it from publishing anything later.

        Args:
            force: The launcher has said that this process writes now.

        Raises:
            SettingError: Another job writes there; says which.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            self._has_kernel_lock = files.lock(descriptor) is not False
            is_alive = self._is_alive_with_lock
            if self._has_kernel_lock:
                is_alive = self._is_alive_on_other_host
            if not force and is_alive(descriptor):
                owner = _read_owner(descriptor)
                raise SettingError(
                    f"another job writes to {self._path.parent}",
                    found=owner.describe() if owner else "its owner could not be read",
                    remedy="give this job a --run-dir of its own, or wait until the other has"
                    f" ended (at most {STALE_AFTER_S:.0f} s longer if it was killed)",
                )
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _HELD_LOCKS.add(self)
        with contextlib.suppress(OSError):  # of SMB, while a former writer holds the kernel's lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(self.owner)).encode(), 0)

    def _is_alive_with_lock(self, descriptor: int) -> bool:
        """Whether the holder of the kernel's lock must be assumed to write."""
        owner = _read_owner(descriptor)
        if owner is None or not owner.run:
            return True
        ended = owner.run == self._run or self._owns_run_directory()
        return not ended or self._has_heartbeat(os.fstat(descriptor).st_mtime)

    def _is_alive_on_other_host(self, descriptor: int) -> bool:
        """Whether a holder that the kernel's lock does not reach is alive."""
        owner = _read_owner(descriptor)
        if owner is None or owner.host == socket.gethostname():
            return False
        if owner.run and owner.run == self._run:
            return False
        heartbeat = os.fstat(descriptor).st_mtime
        if self._server_time() - heartbeat >= STALE_AFTER_S:
            return False
        return not (owner.run and self._owns_run_directory()) or self._has_heartbeat(heartbeat)

    def _server_time(self) -> float:
        """Returns the time by the clock that sets heartbeats, which need not be this host's."""
        probe = self._path.with_name(f"{_PROBE_PREFIX}0-{secrets.token_hex(8)}")
        try:
            probe.touch()
            try:
                return probe.stat().st_mtime
            finally:
                probe.unlink()
        except OSError:  # the disk takes no more names
            return time.time()

    def _owns_run_directory(self) -> bool:
        """Whether our launcher holds the run directory, so earlier runs there have ended."""
        folder = os.environ.get(jobenv.RUN_DIR, "")
        return bool(self._run and folder) and Path(folder) == self._path.parent.parent

    def _has_heartbeat(self, heartbeat: float) -> bool:
        """Whether the holder shows a heartbeat within :data:`WATCH_S`."""
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(WATCH_S / 20)
            with contextlib.suppress(OSError), self._path.open("rb") as file:  # not a cached one
                if os.fstat(file.fileno()).st_mtime != heartbeat:
                    return True
        return False

    @property
    def owner(self) -> LockOwner:
        """This process as an owner."""
        return LockOwner(socket.gethostname(), os.getpid(), time.strftime("%F %T"), self._run)

    def refresh(self) -> None:
        """Sends the heartbeat if it is due; cheap enough for every step."""
        time_s = time.monotonic()
        if self._descriptor is not None and time_s >= self._refresh_at:
            self._refresh_at = time_s + HEARTBEAT_S
            with contextlib.suppress(OSError):
                if not self._has_kernel_lock:
                    self._has_kernel_lock = files.lock(self._descriptor) is not False
                os.utime(self._path)

    def abandon(self) -> None:
        """Closes the descriptor, also in a forked child, which does not own the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def release(self) -> None:
        """Releases the lock."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        self.abandon()


_HELD_LOCKS: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _abandon_all() -> None:
    """Closes locks in a forked child: a loader's worker may outlive a killed rank by seconds."""
    for lock in list(_HELD_LOCKS):
        lock.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _read_owner(descriptor: int) -> LockOwner | None:
    try:
        content: Any = json.loads(os.pread(descriptor, 4096, 0))
        return LockOwner(**content)
    # a share of SMB lets nobody read a locked file
    except (ValueError, TypeError, OSError, RecursionError):
        return None
