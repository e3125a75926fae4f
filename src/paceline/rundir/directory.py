"""The writer of the run directory on the launching machine, and the redactor of its files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from paceline.agent.files import safe_paths, snapshot
from paceline.agent.files.planted import is_planted
from paceline.remote import this_machine
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.ownership import detached_of, owner_alive, owner_here, read_owner
from paceline.rundir.records import objects_in, open_regular, read_object
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.finding import Finding
from paceline.spec.formatting import DATE_TIME, shell_text
from paceline.spec.job import MASK

MAX_OPEN_FILES = 64  # at once; there is a log for every rank
RESERVED_BYTES = 1 << 18
# Logs leave so much of the disk free, or a tenth of the disk, or half of what was free at first.
# This is more than fetched files leave free.
LOG_RESERVE_BYTES = 1 << 30
MIN_LOG_RESERVE_BYTES = 16 << 20  # or a twentieth of the disk
CHECKED_BYTES = 1 << 20  # of output, after which the free space is looked at


class RunDirectory:
    """One run's folder, owned by this process until :meth:`close`.

    Only the user can access a new folder. Writing follows no links inside the folder.

    Attributes:
        path: Absolute path.
        run_id: Of the current run.
        probe_token: A secret in the probe file, by which a node detects that it shares this folder.
    """

    def __init__(self, path: Path, secrets: Sequence[str] = (), run_id: str = "") -> None:
        self.path, self.run_id = path.absolute(), run_id
        self.probe_token = os.urandom(16).hex()
        self._redactor = Redactor(secrets)
        self._files: dict[str, IO[bytes]] = {}  # least recently used first
        self._unchecked_bytes = CHECKED_BYTES  # of output since the free space was looked at
        self._log_reserve_bytes: int | None = None  # unknown until there is output
        with self._explained():
            safe_paths.make_folder(str(self.path.parent), 0o775)
            self.path.mkdir(mode=0o700, exist_ok=True)
            require_usable(self.path)
            self._read_key()  # SettingError if the file is something else
            self._claim()
            Arrivals(self.path).mark_start()  # before the run writes other files

    @property
    def key(self) -> str:
        """Identifies this folder on nodes that do not share it. SettingError for another file."""
        with self._explained():
            key = self._read_key()
            if not key:
                key = os.urandom(12).hex()
                safe_paths.write_file(str(self.path), names.KEY, key.encode())
            return key

    def _read_key(self) -> str:
        """The key, or an empty text; a full disk may have left an empty file."""
        try:
            fd = safe_paths.open_file(str(self.path), names.KEY, os.O_RDONLY)
        except FileNotFoundError:
            return ""
        with os.fdopen(fd, "rb") as file:
            key = file.read(64).decode(errors="replace").strip()
        if key and not snapshot.is_key(key):
            raise SettingError(
                f"{self.path / names.KEY} holds no key of a run",
                found=repr(key),
                remedy="If the folder is yours, remove the key: "
                + shell_text(["rm", str(self.path / names.KEY)])
                + "\n(checkpoints that were not fetched from a node are then not found)",
            )
        return key

    def pop_sign(self, identity: str) -> bool:
        """Whether the agent with that identity wrote its sign file here; removes the file."""
        try:
            (self.path / f"{snapshot.SIGN_PREFIX}{identity}").unlink()
        except OSError:
            return False
        return True

    def _claim(self) -> None:
        """Writes the owner file; raises SettingError if another running job owns the folder."""
        owner = read_owner(self.path)
        is_locked = self._is_probe_locked()
        if owner is not None and (is_locked or owner_alive(owner)):
            command = shell_text(["rm", str(self.path / names.OWNER)])
            hint = "" if owner_here(owner) else f"; if {owner['host']} is gone for good: {command}"
            if owner_here(owner) and "start" not in owner:  # the process id may have been reused
                hint = f"; if that process is no paceline: {command}"
            if is_locked:
                hint = ""
            raise SettingError(
                f"the run directory {self.path} is in use",
                found=f"by process {owner['pid']} on {owner['host']}, since {owner['since']}",
                remedy=f"Wait for it, or give another --run-dir{hint}",
            )
        owner_record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start": this_machine.start_time(os.getpid()),
            "since": time.strftime(DATE_TIME),
            **({"run_id": self.run_id} if self.run_id else {}),
        }
        self.write_json(names.OWNER, owner_record)
        safe_paths.write_file(str(self.path), names.PROBE, self.probe_token.encode())
        # held open to prove that this process is the launcher: see ownership.is_launcher
        self._probe = open_regular(self.path / names.PROBE)
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(self._probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # a full disk is reported by the next write
            reserve = os.urandom(RESERVED_BYTES)  # which no file system can compress
            safe_paths.write_file(str(self.path), names.DISK_RESERVE, reserve, durable=False)

    def _is_probe_locked(self) -> bool:
        """Whether a launcher lives, perhaps in a container with process ids of its own."""
        try:
            file = safe_paths.open_file(str(self.path), names.PROBE, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        finally:
            os.close(file)
        return False

    @property
    def is_owned(self) -> bool:
        """False once somebody has removed the folder or its probe file."""
        with contextlib.suppress(OSError):
            probe = os.fstat(self._probe.fileno())
            return os.path.samestat(probe, (self.path / names.PROBE).lstat())
        return False

    def free_reserve(self) -> None:
        """Frees the disk space that was reserved for the run's result."""
        with contextlib.suppress(OSError):
            (self.path / names.DISK_RESERVE).unlink()

    def redacted(self, text: str) -> str:
        """A text without secrets, as in the run's files."""
        return self._redactor.text(text)

    def write_json(self, name: str, value: Any, durable: bool = True) -> None:
        """Writes a JSON file atomically.

        Args:
            durable: Whether it must survive a power failure, which takes longer.
        """
        with self._explained():
            text = json.dumps(value, indent=2 if durable else None)
            data = self._redactor.whole(text.encode()) + b"\n"
            safe_paths.write_file(str(self.path), name, data, durable)

    def append_line(
        self, name: str, value: Mapping[str, Any], accepts: Callable[[int], bool] = bool
    ) -> dict[str, Any]:
        """Appends one object to a ``.jsonl`` file, and returns it without secrets.

        Args:
            accepts: Whether to append a line of that many bytes; by default, always.
        """
        line = json.dumps(value).encode()
        redacted = self._redactor.whole(line)
        if accepts(len(redacted) + 1):
            self._append(name, redacted + b"\n")
        return dict(value if redacted == line else json.loads(redacted))

    def event(self, kind: str, host: str | None = None, rank: int | None = None, /,
              **details: Any) -> dict[str, Any]:  # fmt: skip
        """Appends to events.jsonl; ``time`` is seconds since 1970 on the launching machine."""
        return self.append_line(names.EVENTS, event_line(kind, host, rank, details))

    def append_bytes(self, name: str, data: bytes, stream: str = "") -> None:
        """Appends bytes of a stream to a file, without secrets, even if several calls bring one."""
        self._append(name, self._redactor.piece(name, stream, data))

    def append_output(self, name: str, data: bytes, stream: str = "") -> bool:
        """Appends a rank's output like :meth:`append_bytes`, or drops it if the disk gets full.

        Returns:
            Whether it was appended.
        """
        has_room = self.has_room(len(data))
        if has_room:
            self.append_bytes(name, data, stream)
        return has_room

    def has_room(self, num_bytes: int) -> bool:
        """Whether the disk has room for more bytes of ranks' output and reports.

        Results and checkpoints that are fetched later need the reserve.
        """
        self._unchecked_bytes += num_bytes
        if self._unchecked_bytes >= CHECKED_BYTES:
            with self._explained():
                usage = shutil.disk_usage(self.path)
            if self._log_reserve_bytes is None:
                reserve = min(LOG_RESERVE_BYTES, usage.total // 10, usage.free // 2)
                self._log_reserve_bytes = max(
                    reserve, min(MIN_LOG_RESERVE_BYTES, usage.total // 20)
                )
            has_room = usage.free - num_bytes >= self._log_reserve_bytes
            self._unchecked_bytes = 0 if has_room else CHECKED_BYTES
        return self._unchecked_bytes < CHECKED_BYTES

    def finish(self, name: str) -> None:
        """Writes data that was held back because it might have been part of a secret."""
        if data := self._redactor.flush(name):
            self._append(name, data)

    def size(self, name: str) -> int:
        """Bytes of a file that this or an earlier run wrote; 0 if there is none."""
        try:
            return (self.path / name).lstat().st_size
        except OSError:
            return 0

    def _append(self, name: str, data: bytes) -> None:
        with self._explained():
            self._file(name).write(data)

    def _file(self, name: str) -> IO[bytes]:
        """The open file; closes the least recently used one if there are too many."""
        file = self._files.pop(name, None)
        if file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            fd = safe_paths.open_file(str(self.path), name, flags)
            file = os.fdopen(fd, "ab", buffering=0)
        self._files[name] = file
        if len(self._files) > MAX_OPEN_FILES:
            self._files.pop(next(iter(self._files))).close()
        return file

    def set_aside(self, name: str) -> None:
        """Renames an earlier run's ``.jsonl`` file."""
        with self._explained():
            if file := self._files.pop(name, None):
                file.close()
            if (path := self.path / name).exists():
                path.rename(names.backup_name(path))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            is_remote = self.path in _display_paths  # the user is on another machine
            machine = socket.gethostname() if is_remote else "this machine"
            remedy = "Give a --run-dir that you may write to"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                other = "name another host: --supervisor HOST"
                other = other if is_remote else "give --run-dir on another disk"
                remedy = f"Free some space there, or {other}"
            elif error.errno == errno.ELOOP:
                remedy = f"Look at what is there: {shell_text(['ls', '-l', str(error.filename)])}"
            raise NodeError(
                f"cannot write to the run directory {self.path} on {machine}",
                found=f"{error.strerror}" + (f" ({error.filename})" if error.filename else ""),
                remedy=remedy,
            ) from error

    def close(self) -> None:
        """Closes all files and releases the folder."""
        for name in self._redactor.pending_files:
            with contextlib.suppress(NodeError):  # the disk may be full
                self.finish(name)
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._probe.close()
        shutil.rmtree(self.path / safe_paths.INCOMING, ignore_errors=True)
        for name in (names.OWNER, names.PROBE, names.DISK_RESERVE):
            with contextlib.suppress(OSError):
                (self.path / name).unlink()


def event_line(kind: str, host: str | None, rank: int | None,
               details: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    """The object of an event in events.jsonl."""
    record: dict[str, Any] = {"time": round(time.time(), 4)}
    record |= {"host": host} if host else {}
    record |= {"rank": rank} if rank is not None else {}
    return {**record, "event": kind, **details}


def require_usable(folder: Path) -> None:
    """Raises SettingError if a run must not use the folder.

    That is so if files that a run would replace are not those of a run; if a detached run is not
    over, or its results are not here; or if a name of a run is a link: then a folder from elsewhere
    would choose what is read, sent to hosts and removed. Nor may another user have made it or the
    folder above where everybody may: that user could put another folder in its place. Nor may its
    path have control characters, which no agent accepts.
    """
    path = str(folder.absolute())
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in path):
        raise SettingError(
            "the path of a run directory must not have control characters",
            found=repr(path),
            remedy="Rename the folder, or give a --run-dir elsewhere",
        )
    require_own_place(folder)
    if not folder.is_dir():
        return
    if links := [path for path in names.run_entries(folder) if path.is_symlink()]:
        raise SettingError(
            f"the run directory {folder} holds links under names that a run uses",
            found="\n".join(f"{path.name} -> {path.readlink()}" for path in links[:5]),
            remedy="Move what they lead to in their place, or give a --run-dir on that disk, which"
            " may itself be a link. If the folder came from somebody else, remove them",
        )
    if (detached := detached_of(folder)) is not None:
        attach, stop = (shell_text(["paceline", verb, str(folder)]) for verb in ("attach", "stop"))
        remove = shell_text(["rm", str(folder / names.DETACHED)])
        raise SettingError(
            f"the run directory {folder} belongs to a detached run that is not over, or whose"
            " results are not here",
            found=f"it was detached on {detached.host}",
            remedy=f"Give another --run-dir. Or fetch its results first: {attach}\nIf it still"
            f" runs, that shows it, and {stop} ends it. If that host is gone for good: {remove}",
        )
    foreign = names.replaced_files(folder)
    if foreign:
        raise SettingError(
            f"the run directory {folder} holds files of something else",
            found=f"{', '.join(foreign)}, and no run was here",
            remedy="Give another --run-dir, or move those files away",
        )


def require_own_place(folder: Path) -> None:
    """Raises SettingError if another user made a folder, or the one above, where everybody may."""
    for path in (folder.parent, folder):
        if is_planted(str(path)) and not _is_team_folder(path):
            raise SettingError(
                f"{path} belongs to another user, and everybody may make files beside it",
                found="its owner could read and replace the results of the run",
                remedy="Work in a folder of yours, or give a --run-dir there",
            )


def _is_team_folder(path: Path) -> bool:
    """Whether only a group of this user may write to a folder of another user that was named.

    Nobody names the folder ``runs`` in which runs are by default.
    """
    status = path.lstat()  # anybody may make a link to one
    is_for_group = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) == stat.S_IWGRP
    is_member = status.st_gid in (os.getegid(), *os.getgroups())
    return path.name != names.DEFAULT_PARENT and is_for_group and is_member


def write_text(folder: Path, name: str, text: str) -> None:
    """Writes a file into a run directory that this process need not own, as UTF-8.

    The file is written atomically and replaces a link, a pipe or a file of that name. No link is
    followed. Not for use while a launcher writes into the folder: see :class:`RunDirectory`.
    """
    try:
        safe_paths.write_file(str(folder), name, text.encode())
    finally:
        with contextlib.suppress(OSError):  # another process is receiving files
            (folder / safe_paths.INCOMING).rmdir()


def write_explanation(run: Path, findings: Iterable[Finding]) -> None:
    """Writes what explains a failure into the run's findings.json, behind what the checks found."""
    content = read_object(run / names.FINDINGS) or {}
    retained = [finding for finding in objects_in(content.get("findings"))
                if not str(finding.get("check", "")).startswith("explain/")]  # fmt: skip
    content["findings"] = [*retained, *(finding.to_json() for finding in findings)]
    text = json.dumps(content, indent=2)
    with contextlib.suppress(OSError):  # a run on a full or foreign disk can still be explained
        write_text(run, names.FINDINGS, f"{text}\n")


def fresh_path(parent: Path, name: str) -> Path:
    """``NAME-DATE-TIME`` below ``parent``, numbered when several start in the same second."""
    base = f"{names.safe_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = parent / (base if number == 1 else f"{base}-{number}")
        if not path.exists():
            return path
    raise SettingError(f"{parent} holds too many runs of this second")


def claim(parent: Path, name: str) -> Path:
    """Makes a new folder, even if several runs start in the same second."""
    safe_paths.make_folder(str(parent), 0o775)
    while True:
        path = fresh_path(parent, name)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path


@contextlib.contextmanager
def claimed(parent: Path, name: str) -> Iterator[Path]:
    """A new folder, which is removed if it stays empty.

    If it cannot be made, the path is only chosen; the first write to it reports the error.
    """
    parent_existed = parent.exists()
    try:
        path = claim(parent, name)
    except OSError:
        path = fresh_path(parent, name)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
            if not parent_existed:
                parent.rmdir()


_display_paths: dict[Path, str] = {}


def set_display_path(path: Path, name: str) -> None:
    """Sets the name of a run directory on the machine where its run was started."""
    _display_paths[path] = name


def short(path: Path) -> str:
    """A path relative to the working directory, or as it is where the run was started."""
    for folder, name in _display_paths.items():
        if path.is_relative_to(folder):
            return str(Path(name) / path.relative_to(folder))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class Redactor:
    """Removes secrets from the data of files, even if a secret comes in pieces.

    Args:
        secrets: Texts that no file may contain, either plain or escaped as in JSON.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        encoded = [os.fsencode(secret) for secret in secrets]
        escaped = [json.dumps(secret)[1:-1].encode() for secret in secrets]
        # the longer first, because one secret may be a prefix of another
        self._secrets = sorted({*encoded, *escaped}, key=len, reverse=True)
        self._texts = sorted({*secrets}, key=len, reverse=True)
        self._pending: dict[tuple[str, str], bytes] = {}

    def whole(self, data: bytes) -> bytes:
        """Complete data without the secrets."""
        for secret in self._secrets:
            data = data.replace(secret, MASK.encode())
        return data

    def text(self, text: str) -> str:
        """A text without the secrets."""
        for secret in self._texts:
            text = text.replace(secret, MASK)
        return text

    def piece(self, name: str, stream: str, data: bytes) -> bytes:
        """The data of a stream that can be written now.

        A possible prefix of a secret is held back until the next piece or :meth:`flush`.
        """
        data = self.whole(self._pending.pop((name, stream), b"") + data)
        count = max((_overlap(data, secret) for secret in self._secrets), default=0)
        if not count:
            return data
        self._pending[name, stream] = data[-count:]
        return data[:-count]

    def flush(self, name: str) -> bytes:
        """The data that was held back of a file's streams, at their end."""
        keys = [key for key in self._pending if key[0] == name]
        return b"".join(self._pending.pop(key) for key in keys)

    @property
    def pending_files(self) -> set[str]:
        """Files of which data is held back."""
        return {name for name, _ in self._pending}


def _overlap(data: bytes, secret: bytes) -> int:
    """Number of bytes at the end of ``data`` that are a prefix of ``secret``."""
    limit = min(len(secret) - 1, len(data))
    return next((n for n in range(limit, 0, -1) if data.endswith(secret[:n])), 0)
