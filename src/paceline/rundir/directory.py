"""The run directory on the launching machine: the only writer of its files, and their redactor."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from paceline.agent import inside, snapshot
from paceline.remote import this_machine
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.ownership import owner_alive, owner_here, read_owner
from paceline.rundir.records import open_regular
from paceline.spec import rundir as names
from paceline.spec.command import shell_text
from paceline.spec.errors import NodeError, SettingError

OPEN_FILES = 64  # at once: there is a log for every rank
ROOM_BYTES = 1 << 18
MASK = b"[secret]"


class RunDirectory:
    """One run's folder, owned by this process until :meth:`close`.

    It is made for the user alone, and what is written into it follows no link inside it.

    Attributes:
        path: Absolute path.
        run_id: Of the run that is under way in it.
        token: A secret in the probe file, by which a node finds out whether it sees this very
            folder.
    """

    def __init__(self, path: Path, secrets: Sequence[str] = (), run_id: str = "") -> None:
        self.path, self.run_id = path.absolute(), run_id
        self.token = os.urandom(16).hex()
        self._redactor = Redactor(secrets)
        self._files: dict[str, IO[bytes]] = {}  # the last used at the end
        self.begins: dict[str, int] = {}  # bytes that earlier runs left in a file
        with self._explained():
            self.path.parent.mkdir(mode=0o775, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._read_key()
            self._own()
            Arrivals(self.path)  # nothing else of the run lies there yet

    @property
    def key(self) -> str:
        """Names this very folder on nodes that do not see it; a new folder has a new one.

        SettingError when the folder holds something else in its place.
        """
        with self._explained():
            key = self._read_key()
            if not key:
                key = os.urandom(12).hex()
                inside.write_file(str(self.path), names.KEY, key.encode())
            return key

    def _read_key(self) -> str:
        """The key, if there is one yet: an empty file is what an older full disk left."""
        try:
            fd = inside.open_file(str(self.path), names.KEY, os.O_RDONLY)
        except FileNotFoundError:
            return ""
        with os.fdopen(fd, "rb") as file:
            key = file.read(64).decode(errors="replace").strip()
        if key and not snapshot.is_key(key):
            raise SettingError(
                f"{self.path / names.KEY} holds no key of a run",
                found=repr(key),
                remedy="If the folder is yours, have it made anew: "
                + shell_text(["rm", str(self.path / names.KEY)])
                + "\n(checkpoints that never came home from a node are not found there then)",
            )
        return key

    def take_sign(self, identity: str) -> bool:
        """Whether the sign of the agent with that identity arrived here; removes it."""
        try:
            (self.path / f"{snapshot.SIGN}{identity}").unlink()
        except OSError:
            return False
        return True

    def _own(self) -> None:
        """Marks the folder as ours; SettingError when another running job has it."""
        owner = read_owner(self.path)
        if owner is not None and owner_alive(owner):
            # that a machine is gone for good only its owner can say
            command = shell_text(["rm", str(self.path / names.OWNER)])
            gone = "" if owner_here(owner) else f"; if {owner['host']} is gone for good: {command}"
            if owner_here(owner) and "start" not in owner:  # anybody's process may have that number
                gone = f"; if that process is no paceline: {command}"
            raise SettingError(
                f"the run directory {self.path} is in use",
                found=f"by process {owner['pid']} on {owner['host']}, since {owner['since']}",
                remedy=f"Wait for it, or give another --run-dir{gone}",
            )
        mark = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start": this_machine.started(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            **({"run_id": self.run_id} if self.run_id else {}),
        }
        self.write_json(names.OWNER, mark)
        inside.write_file(str(self.path), names.PROBE, self.token.encode())
        # by which others know that we are its launcher: see ownership.is_launcher
        self._mark = open_regular(self.path / names.PROBE)
        with contextlib.suppress(OSError):  # a disk that is full by now is told of at once
            room = os.urandom(ROOM_BYTES)  # which no file system makes smaller
            inside.write_file(str(self.path), names.ROOM, room, durable=False)

    @property
    def is_there(self) -> bool:
        """False once somebody has removed the folder, or what marks it as ours."""
        with contextlib.suppress(OSError):
            mark = os.fstat(self._mark.fileno())
            return os.path.samestat(mark, (self.path / names.PROBE).lstat())
        return False

    def make_room(self) -> None:
        """Gives away what was kept on the disk for the run's end: its result is written now."""
        with contextlib.suppress(OSError):
            (self.path / names.ROOM).unlink()

    def redacted(self, text: str) -> str:
        """A text as the run's files show it: without secrets."""
        return self._redactor.text(text)

    def write_json(self, name: str, value: Any, durable: bool = True) -> None:
        """Writes a whole JSON file at once.

        Args:
            name, value: What is written.
            durable: It is to be there after a power failure, too. That may take a while.
        """
        with self._explained():
            text = json.dumps(value, indent=2 if durable else None)
            data = self._redactor.whole(text.encode()) + b"\n"
            inside.write_file(str(self.path), name, data, durable)

    def append_line(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """Adds one object to a ``.jsonl`` file; returns it as it stands there, without secrets."""
        line = json.dumps(value).encode()
        shown = self._redactor.whole(line)
        self._append(name, shown + b"\n")
        return value if shown == line else dict(json.loads(shown))

    def event(self, kind: str, host: str | None = None, rank: int | None = None,
              **details: Any) -> dict[str, Any]:  # fmt: skip
        """Adds to events.jsonl; ``time`` is seconds since 1970 on the launching machine."""
        where = {"host": host} if host else {}
        who = {"rank": rank} if rank is not None else {}
        record = {"time": round(time.time(), 4), **where, **who, "event": kind, **details}
        return self.append_line(names.EVENTS, record)

    def append_bytes(self, name: str, data: bytes, stream: str = "") -> None:
        """Adds to any file of the run; named secrets are taken out, also over several calls.

        Args:
            name: The file.
            data: What comes next.
            stream: Of what, where several streams share a file.
        """
        self._append(name, self._redactor.piece(name, stream, data))

    def finish(self, name: str) -> None:
        """Writes what was held back of a file, for it might have been a secret's beginning."""
        if rest := self._redactor.rest(name):
            self._append(name, rest)

    def _append(self, name: str, data: bytes) -> None:
        with self._explained():
            self._file(name).write(data)

    def _file(self, name: str) -> IO[bytes]:
        """The file, open for adding; those that were not added to for longest are closed."""
        file = self._files.pop(name, None)
        if file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            fd = inside.open_file(str(self.path), name, flags)
            self.begins.setdefault(name, os.fstat(fd).st_size)
            file = os.fdopen(fd, "ab", buffering=0)
        self._files[name] = file
        if len(self._files) > OPEN_FILES:
            self._files.pop(next(iter(self._files))).close()
        return file

    def set_aside(self, name: str) -> None:
        """Keeps an earlier run's ``.jsonl`` file under another name."""
        with self._explained():
            if file := self._files.pop(name, None):
                file.close()
            if (old := self.path / name).exists():
                old.rename(names.aside(old))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = error.errno in (errno.ENOSPC, errno.EDQUOT)
            linked = error.errno == errno.ELOOP
            there = self.path in _called  # whoever reads it is on another machine
            raise NodeError(
                f"cannot write to the run directory {self.path} on "
                + (socket.gethostname() if there else "this machine"),
                found=f"{error.strerror}" + (f" ({error.filename})" if error.filename else ""),
                remedy="Free some space there, or "
                + (
                    "name another host: --supervisor HOST"
                    if there
                    else "give --run-dir on another disk"
                )
                if free
                else f"Look at what is there: {shell_text(['ls', '-l', str(error.filename)])}"
                if linked
                else "Give a --run-dir that you may write to",
            ) from error

    def close(self) -> None:
        """Gives the folder up."""
        for name in self._redactor.waiting:
            with contextlib.suppress(NodeError):  # the disk may be full
                self.finish(name)
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._mark.close()
        shutil.rmtree(self.path / inside.INCOMING, ignore_errors=True)
        for name in (names.OWNER, names.PROBE, names.ROOM):
            with contextlib.suppress(OSError):
                (self.path / name).unlink()


def fresh_path(parent: Path, name: str) -> Path:
    """``NAME-DATE-TIME`` below ``parent``, numbered when several start in the same second."""
    base = f"{names.safe(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = parent / (base if number == 1 else f"{base}-{number}")
        if not path.exists():
            return path
    raise SettingError(f"{parent} holds too many runs of this second")


def claim(parent: Path, name: str) -> Path:
    """Makes a fresh folder, which nobody else gets that starts in the same second."""
    parent.mkdir(mode=0o775, parents=True, exist_ok=True)
    while True:
        path = fresh_path(parent, name)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path


@contextlib.contextmanager
def claimed(parent: Path, name: str) -> Iterator[Path]:
    """A fresh folder, which goes again if nothing came into it.

    Where none can be made it is only a name: whoever writes there explains it better.
    """
    was_there = parent.exists()
    try:
        path = claim(parent, name)
    except OSError:
        path = fresh_path(parent, name)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
            if not was_there:
                parent.rmdir()


_called: dict[Path, str] = {}


def call_it(path: Path, name: str) -> None:
    """The user knows a run directory by another name: as it is typed where the run was started."""
    _called[path] = name


def short(path: Path) -> str:
    """A path as people type it from here, or from where the run was started."""
    for known, name in _called.items():
        if path.is_relative_to(known):
            return str(Path(name) / path.relative_to(known))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class Redactor:
    """Keeps named secrets out of files, also when a secret comes in pieces.

    Args:
        secrets: What no file may show; as text, and as JSON writes it.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        plain = [os.fsencode(secret) for secret in secrets]
        quoted = [json.dumps(secret)[1:-1].encode() for secret in secrets]
        # one secret may be the beginning of another: the longer first
        self._secrets = sorted({*plain, *quoted}, key=len, reverse=True)
        self._texts = sorted({*secrets}, key=len, reverse=True)
        self._held: dict[tuple[str, str], bytes] = {}

    def whole(self, data: bytes) -> bytes:
        """Data that is complete in itself, without the secrets."""
        for secret in self._secrets:
            data = data.replace(secret, MASK)
        return data

    def text(self, text: str) -> str:
        """A text without the secrets."""
        for secret in self._texts:
            text = text.replace(secret, MASK.decode())
        return text

    def piece(self, name: str, stream: str, data: bytes) -> bytes:
        """What can be written of a stream by now.

        What may be the beginning of a secret is held back until the stream goes on or
        :meth:`rest` asks for it.
        """
        data = self.whole(self._held.pop((name, stream), b"") + data)
        count = max((_overlap(data, secret) for secret in self._secrets), default=0)
        if not count:
            return data
        self._held[name, stream] = data[-count:]
        return data[:-count]

    def rest(self, name: str) -> bytes:
        """What was held back of a file's streams: nothing more will come."""
        ours = [key for key in self._held if key[0] == name]
        return b"".join(self._held.pop(key) for key in ours)

    @property
    def waiting(self) -> list[str]:
        """Files of which something is held back."""
        return list(dict.fromkeys(name for name, _ in self._held))


def _overlap(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of ``data`` are the beginning of ``secret``."""
    longest = min(len(secret) - 1, len(data))
    return next((n for n in range(longest, 0, -1) if data.endswith(secret[:n])), 0)
