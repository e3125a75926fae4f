"""Agents that wait on their hosts for this user's next command.

Each has a file below ``~/.cache/paceline/warm`` that only the user can read. A command that uses
the agent locks the file; a second command finds it locked and starts an agent of its own. The file
is a hint: if the agent is gone or does not know the key, the file is removed. A file also says how
to log in, which may start programs, so the folder is read only if nobody else can write there.
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

from paceline.agent.bootstrap import is_trusted_path
from paceline.agent.files import safe_paths
from paceline.agent.reconnection import NONCE_BYTES
from paceline.remote.agent_code import agent_code
from paceline.remote.link import run_process
from paceline.remote.openssh import SshOptions, ssh_command
from paceline.remote.reconnection import AgentAddress, generate_key
from paceline.spec.hosts import Host

MARGIN_S = 1.0  # an agent that ends so soon is not used
CONTROL = "%C"  # ssh's hash of the connection
MAX_CONTROL_BYTES = 108 - len(".") - 16 - 1 - 40 - 1  # bytes left for the folder in a socket's path
MAX_FILE_BYTES = 64 << 10
CONTROL_TIMEOUT_S = 5.0  # for ssh -O


@dataclass(frozen=True, slots=True)
class WarmAgent:
    """A waiting agent; the content of its file.

    Attributes:
        host: Its host's name, as described then.
        address: What ssh connects to; empty for this machine.
        python: Its interpreter.
        place, key: Where it listens, and the shared secret.
        seconds: How long it waits after each use.
        until: When it ends, in seconds since 1970.
        since: When it began to wait.
        nest: Name of the files kept for it on the host.
        boot: The host's boot id: after a reboot the agent is gone.
        imported: The fork server's imports, for people; empty without one.
        user, port, identity_file, config: Login of the host.
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

    def agent_address(self) -> AgentAddress:
        """Where it can be reached."""
        return AgentAddress(self.place, bytes.fromhex(self.key), starts_session=True)

    def as_host(self) -> Host:
        """Its host, for a login."""
        return Host(self.host, address=self.address or self.host, user=self.user, port=self.port,
                    identity_file=self.identity_file, local=not self.address)  # fmt: skip

    def options(self) -> SshOptions:
        return SshOptions(Path(self.config) if self.config else None)


def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "paceline" / "warm"


def is_private() -> bool:
    """Whether the folder exists, and nobody else can read or replace it."""
    try:
        path = os.path.realpath(folder())
        status = os.lstat(path)
        safe_parents: bool = is_trusted_path(path)  # type: ignore[no-untyped-call]
        return _is_owned(status) and stat.S_ISDIR(status.st_mode) and safe_parents
    except OSError:
        return False


def _is_owned(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077


def control_path() -> str | None:
    """Pattern of ssh's control sockets for later logins; ``None`` if there can be none."""
    path = str(folder())
    is_usable = len(os.fsencode(path)) <= MAX_CONTROL_BYTES and "%" not in path
    return f"{path}/{CONTROL}" if is_usable and is_private() else None


class WarmSlot:
    """The file of a waiting agent, for one interpreter and login of a host.

    Attributes:
        waiting: The agent that was claimed from the file, if any.
        name: Name of the files kept on the host.
    """

    def __init__(self, host: Host, python: str, options: SshOptions,
                 path: Path | None = None) -> None:  # fmt: skip
        self.waiting: WarmAgent | None = None
        self.name = secrets.token_hex(8)
        self.host, self._python, self._options = host, python, options
        self._fd: int | None = None
        self.path = path or folder() / f"{_identity(host, python, options)}.json"

    @classmethod
    def from_file(cls, path: Path, waiting: WarmAgent) -> WarmSlot:
        """The slot of an existing file."""
        return cls(waiting.as_host(), waiting.python, waiting.options(), path)

    def claim(self) -> WarmAgent | None:
        """Locks the file and returns its agent; ``None`` without one."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            if not self._lock(create=False):
                return None
            assert self._fd is not None
            agent = _read(self._fd)
            if agent.until - time.time() > MARGIN_S:
                self.waiting, self.name = agent, agent.nest
                return agent
        self.forget()
        return None

    def offer(
        self, seconds: float, boot: str, imported: str, restart_timer: bool
    ) -> WarmAgent | None:
        """Writes the file of an agent that will wait; ``None`` if that fails or another waits.

        Args:
            seconds: How long it waits.
            boot, imported: The host's boot id, and the fork server's imports.
            restart_timer: Restart the time; otherwise keep the previous end.
        """
        started_at, host, previous = time.time(), self.host, self.waiting
        expires_at = started_at + seconds if restart_timer or previous is None else previous.until
        waiting = WarmAgent(
            host.name, "" if host.local else host.address, self._python,
            "paceline-" + secrets.token_hex(NONCE_BYTES), generate_key().hex(), seconds,
            expires_at, started_at, self.name, boot,
            imported or (previous.imported if previous else ""),
            host.user, host.port, host.identity_file,
            str(self._options.config.absolute()) if self._options.config else None,
        )  # fmt: skip
        try:
            if self._fd is None and not self._lock(create=True):
                return None
            assert self._fd is not None
            if self.waiting is None and _is_used(self._fd):
                self.release()
                return None  # another command of this user was faster
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
        await keep_login(self.host, self._options, seconds)

    def release(self) -> None:
        """Unlocks the file, so that another command can claim the agent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def forget(self) -> None:
        """Removes the file, because the agent is gone."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                if _is_at(self._fd, self.path):
                    self.path.unlink()
        self.waiting = None
        self.release()

    def _lock(self, create: bool) -> bool:
        """Opens and locks the file; False if it is locked or not private."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if create:
            safe_paths.make_folder(str(folder()))
        elif not self.path.exists():
            return False
        if not is_private():
            return False
        fd = os.open(self.path, flags | (os.O_CREAT if create else 0), 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(fd)
            if not (_is_owned(status) and stat.S_ISREG(status.st_mode) and _is_at(fd, self.path)):
                raise BlockingIOError
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return True


def _identity(host: Host, python: str, options: SshOptions) -> str:
    """Hash of everything that must be equal for a waiting agent to replace a new one."""
    config = str(options.config.absolute()) if options.config else None
    login = None if host.local else [host.address, host.user, host.port, host.identity_file, config]
    identity = [socket.gethostname(), os.getuid(), login, python, agent_code().digest]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still at its path."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False


def _read(fd: int) -> WarmAgent:
    """Parses a file; raises ValueError or TypeError if it is not valid."""
    record: Any = json.loads(os.pread(fd, MAX_FILE_BYTES, 0))
    if not isinstance(record, dict):
        raise ValueError("not ours")
    names = {field.name for field in fields(WarmAgent)}
    agent = WarmAgent(**{name: value for name, value in record.items() if name in names})
    texts = (agent.host, agent.address, agent.python, agent.place, agent.nest, agent.boot,
             agent.imported)  # fmt: skip
    numbers = (agent.seconds, agent.until, agent.since)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("not ours")
    if not all(isinstance(number, (int, float)) and abs(number) < 1e18 for number in numbers):
        raise ValueError("not ours")
    bytes.fromhex(agent.key)
    return agent


def _is_used(fd: int) -> bool:
    """Whether the file describes an agent that still waits."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return _read(fd).until - time.time() > MARGIN_S
    return False


def warm_slots() -> Iterator[tuple[Path, WarmAgent, bool]]:
    """Yields all files with their agents, and whether they are in use."""
    for path in sorted(folder().glob("*.json")) if is_private() else []:
        with contextlib.suppress(OSError, ValueError, TypeError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                agent = _read(fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    is_used = False
                except OSError:
                    is_used = True
            finally:
                os.close(fd)
            if is_used or agent.until > time.time():
                yield path, agent, is_used
            else:
                path.unlink()


# --- kept logins


async def keep_login(host: Host, options: SshOptions, seconds: float) -> None:
    """Makes ssh keep a connection to the host for later logins, until ``seconds`` after the last.

    Does not wait; if it fails, the next login is an ordinary one.
    """
    control = control_path()
    if host.local or control is None or options.accept_new_host_keys:
        return
    if await _run_control_command(host, options, control, "check"):
        return
    persist = {"ControlMaster": "yes", "ControlPersist": str(max(1, round(seconds)))}
    argv = ssh_command(host, options, [], control, persist, ["-N", "-f"])
    with contextlib.suppress(OSError):  # asyncio would end it with its loop
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip


async def end_login(host: Host, options: SshOptions) -> None:
    """Ends the kept connection."""
    if (control := control_path()) is not None and not host.local:
        await _run_control_command(host, options, control, "exit")


async def _run_control_command(host: Host, options: SshOptions, control: str, command: str) -> bool:
    argv = ssh_command(host, options, [], control, {}, ["-O", command])
    try:
        return (await run_process(argv, CONTROL_TIMEOUT_S)).returncode == 0
    except (OSError, asyncio.TimeoutError):
        return False
