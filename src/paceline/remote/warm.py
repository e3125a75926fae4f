"""Hosts that stay ready for this user's next command: where their agents wait, and who may come.

Of each there is a file below ``~/.cache/paceline/warm`` that nobody else can read. Whoever uses the
agent holds a lock on it, which goes with the process; a second command finds it locked and does
without. The file is only a hint: an agent that is not there, or that does not know the key, is
forgotten. But it says how to log in, which may start programs (an ssh configuration's do): so the
folder is looked into only where nobody else could have put anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.agent.bootstrap import ours_alone
from paceline.agent.reconnection import NONCE_BYTES
from paceline.remote.agent_code import agent_code
from paceline.remote.openssh import SshOptions, ssh_command
from paceline.remote.reconnection import Place, fresh_key
from paceline.spec.hosts import Host

MARGIN_S = 1.0  # an agent whose time is over so soon is not met any more
CONTROL = "%C"  # by which ssh names what it connects to, in its own words
CONTROL_ROOM = 108 - len(".") - 16 - 1 - 40 - 1  # bytes of the folder, in the path of a socket
LARGEST = 64 << 10  # bytes of a file of ours


@dataclass(frozen=True, slots=True)
class Waiting:
    """An agent that waits, as its file tells.

    Attributes:
        host: Its host's name, as the host was described then.
        address: What ssh was given; empty for this machine.
        python: The interpreter that it runs on.
        place, key: Where it is met, and by what it knows us.
        seconds: How long it waits after each use.
        until: When it ends, in seconds since 1970.
        since: When it began to wait.
        nest: Names what is kept for it on the host.
        boot: Of the host: another one has no such agent.
        imported: What its fork server has imported, for people; empty without one.
        user, port, identity_file, config: How the host was logged in to.
    """

    host: str
    address: str
    python: str
    place: str
    key: str = field(repr=False)
    seconds: float
    until: float
    since: float
    nest: str
    boot: str = ""
    imported: str = ""
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    config: str | None = None

    def where(self) -> Place:
        """Where and how it is met."""
        return Place(self.place, bytes.fromhex(self.key), anew=True)

    def as_host(self) -> Host:
        """Its host, as far as it has to be known for a login."""
        return Host(self.host, address=self.address or self.host, user=self.user, port=self.port,
                    identity_file=self.identity_file, local=not self.address)  # fmt: skip

    def options(self) -> SshOptions:
        return SshOptions(Path(self.config) if self.config else None)


def folder() -> Path:
    """Where the files are."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "paceline" / "warm"


def is_ours() -> bool:
    """Whether the folder is there, and nobody else can look into it or put another in its place."""
    try:
        place = os.path.realpath(folder())
        about = os.lstat(place)
        closed = about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o077
        alone: bool = ours_alone(place)  # type: ignore[no-untyped-call]
        return closed and stat.S_ISDIR(about.st_mode) and alone
    except OSError:
        return False


def _make_folder() -> None:
    """Makes the folder, with those above it, for the user alone whatever the umask."""
    missing = [folder()]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def control_path() -> str | None:
    """Where ssh keeps a connection for the next login; ``None`` where it can keep none.

    ssh itself puts in what it connects to: another configuration is another path.
    """
    place = str(folder())
    fits = len(os.fsencode(place)) <= CONTROL_ROOM and "%" not in place
    return f"{place}/{CONTROL}" if fits and is_ours() else None


class Nest:
    """The file of one agent, for one interpreter of one host as it is logged in to from here.

    Args:
        host, python, options: Which.

    Attributes:
        waiting: The agent that we have taken from there, if there was one.
        name: Names what is kept on the host, before and after.
    """

    def __init__(self, host: Host, python: str, options: SshOptions,
                 path: Path | None = None) -> None:  # fmt: skip
        self.waiting: Waiting | None = None
        self.name = secrets.token_hex(8)
        self.host, self._python, self._options = host, python, options
        self._fd: int | None = None
        self.path = path or folder() / f"{_identity(host, python, options)}.json"

    @classmethod
    def at(cls, path: Path, waiting: Waiting) -> Nest:
        """The one whose file is there, as that tells."""
        return cls(waiting.as_host(), waiting.python, waiting.options(), path)

    def take(self) -> Waiting | None:
        """Takes the agent that waits there, so that nobody else does; ``None`` without one."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            if not self._lock(create=False):
                return None
            assert self._fd is not None
            found = _read(self._fd)
            if found.until - time.time() > MARGIN_S:
                self.waiting, self.name = found, found.nest
                return found
        self.forget()
        return None

    def leave(self, seconds: float, boot: str, imported: str, anew: bool) -> Waiting | None:
        """Writes down where an agent will wait; ``None`` where that cannot be, or another does.

        Args:
            seconds: For how long.
            boot: The host's own name of its last start.
            imported: What its fork server has.
            anew: From now on; else the rest of the time that it waits already.
        """
        now, host, before = time.time(), self.host, self.waiting
        until = now + seconds if anew or before is None else before.until
        waiting = Waiting(
            host.name, "" if host.local else host.address, self._python,
            "paceline-" + secrets.token_hex(NONCE_BYTES), fresh_key().hex(), seconds,
            until, now, self.name, boot, imported or (before.imported if before else ""),
            host.user, host.port, host.identity_file,
            str(self._options.config.absolute()) if self._options.config else None,
        )  # fmt: skip
        try:
            if self._fd is None and not self._lock(create=True):
                return None
            assert self._fd is not None
            if self.waiting is None and _is_used(self._fd):
                self._unlock()
                return None  # somebody else's of ours was faster
            data = json.dumps(asdict(waiting)).encode()
            os.ftruncate(self._fd, 0)
            if os.pwrite(self._fd, data, 0) != len(data) or not _is_at(self._fd, self.path):
                raise OSError("not written")
        except OSError:
            self.forget()
            return None
        self.waiting = waiting
        return waiting

    async def keep_login(self, seconds: float) -> None:
        """Has the login kept, too."""
        await keep_login(self.host, self._options, seconds)

    def let_go(self) -> None:
        """Whoever comes may take it from now on."""
        self._unlock()

    def forget(self) -> None:
        """There is no such agent."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                if _is_at(self._fd, self.path):
                    self.path.unlink()
        self.waiting = None
        self._unlock()

    def _lock(self, create: bool) -> bool:
        """Opens and locks the file; False where somebody else has it, or it is not ours alone."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if create:
            _make_folder()
        elif not self.path.exists():
            return False
        if not is_ours():
            return False
        fd = os.open(self.path, flags | (os.O_CREAT if create else 0), 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            about = os.fstat(fd)
            alone = about.st_uid == os.getuid() and not stat.S_IMODE(about.st_mode) & 0o077
            if not (alone and stat.S_ISREG(about.st_mode) and _is_at(fd, self.path)):
                raise BlockingIOError
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return True

    def _unlock(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _identity(host: Host, python: str, options: SshOptions) -> str:
    """Of whoever can take such an agent for the one that would be started."""
    login = (
        None
        if host.local
        else [
            host.address,
            host.user,
            host.port,
            host.identity_file,
            str(options.config.absolute()) if options.config else None,
        ]
    )
    about = [socket.gethostname(), os.getuid(), login, python, agent_code().digest]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False


def _read(fd: int) -> Waiting:
    """ValueError or TypeError for what none of us has written."""
    about: Any = json.loads(os.pread(fd, LARGEST, 0))
    if not isinstance(about, dict):
        raise ValueError("not ours")
    known = {one.name for one in fields(Waiting)}
    found = Waiting(**{name: value for name, value in about.items() if name in known})
    texts = (found.host, found.address, found.python, found.place, found.nest, found.boot,
             found.imported)  # fmt: skip
    numbers = (found.seconds, found.until, found.since)
    if not (all(isinstance(one, str) for one in texts)
            and all(isinstance(one, (int, float)) for one in numbers)):  # fmt: skip
        raise ValueError("not ours")
    bytes.fromhex(found.key)
    return found


def _is_used(fd: int) -> bool:
    """Whether somebody waits already, as the file tells."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return _read(fd).until - time.time() > MARGIN_S
    return False


def every_nest() -> Iterator[tuple[Path, Waiting, bool]]:
    """All that wait, as their files tell, and whether somebody uses them at this moment."""
    for path in sorted(folder().glob("*.json")) if is_ours() else []:
        with contextlib.suppress(OSError, ValueError, TypeError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = _read(fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    used = False
                except OSError:
                    used = True
            finally:
                os.close(fd)
            if used or found.until > time.time():
                yield path, found, used
            else:
                path.unlink()


# --- the login, kept


async def keep_login(host: Host, options: SshOptions, seconds: float) -> None:
    """Has ssh keep a connection to the host for the next logins, for so long after the last one.

    Returns at once; where it cannot be had the next login is one like any other.
    """
    control = control_path()
    if host.local or control is None or options.accept_new_host_keys:
        return
    if await _tell_master(host, options, control, "check"):
        return
    persist = {"ControlMaster": "yes", "ControlPersist": str(max(1, round(seconds)))}
    argv = ssh_command(host, options, [], control, persist, ["-N", "-f"])
    with contextlib.suppress(OSError):  # not one of asyncio's, which would end with its loop
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip


async def end_login(host: Host, options: SshOptions) -> None:
    """The kept connection ends."""
    if (control := control_path()) is not None and not host.local:
        await _tell_master(host, options, control, "exit")


async def _tell_master(host: Host, options: SshOptions, control: str, word: str) -> bool:
    argv = ssh_command(host, options, [], control, {}, ["-O", word])
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return await asyncio.wait_for(process.wait(), 5.0) == 0
    except (OSError, asyncio.TimeoutError):
        return False
