"""The agent between two commands of its user, ready for the next.

It waits for reconnections (see :mod:`.reconnection`) with a fork server that has done its imports,
without connection, network listener, lease or rank, and ends by itself after a given time. The next
command brings a new login; for the ranks all is as if that had started the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sysconfig
import time
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from .supervision import processes

if TYPE_CHECKING:  # a fork server has no need of them
    import socket
    import subprocess
    from pathlib import Path

    from .reconnection import ReconnectListener, Visit

Message = Dict[str, Any]
FOLDER_PREFIX = "warm-"  # begins the names of jobs' folders that stay for the next command
PROCESS_NAME = "paceline-warm"  # of the process meanwhile, in the kernel's tables
POLL_S = 0.2
LOGIN_TIMEOUT_S = 5.0  # for what is told of a login
MAX_LOGIN_BYTES = 4 << 20  # bytes of it
CHUNK_BYTES = 1 << 16
# Variables that are another at each login and that no library looks at while it is imported: the
# ranks get those of the new login. Any other difference means another fork server.
LOGIN_VARIABLES = (
    "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "XDG_SESSION_ID", "SHLVL", "PWD",
    "OLDPWD", "_", "TERM", "COLUMNS", "LINES", "WINDOWID", "TMUX", "TMUX_PANE", "GPG_TTY",
)  # fmt: skip


class Login(NamedTuple):
    """What a process inherits from its login."""

    env: Dict[str, str]
    cwd: str
    umask: int

    def apply(self) -> None:
        """Gives this process that environment, umask and folder."""
        from .files import safe_paths  # here: fork servers have no need of it

        os.environ.clear()
        os.environ.update(self.env)
        os.umask(self.umask)
        safe_paths.tighten_umask()
        with contextlib.suppress(OSError):
            os.chdir(self.cwd)


def parse_login(line: bytes) -> Login:
    """Parses what ``reattach.py`` sends. ValueError for anything else."""
    try:
        login = json.loads(line)
        env = {str(name): str(value) for name, value in login["env"].items()}
        return Login(env, str(login["cwd"]), int(login["umask"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("no login: %s" % error) from None


def current_umask() -> int:
    """Returns this process's umask."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class ServerSpec(NamedTuple):
    """What a fork server was started with; an equal one can take its place.

    Attributes:
        python, preload: The interpreter, and what it imports.
        env: All variables but the login's and the job's token.
        folder: Its working directory if relative import paths depend on it.
        packages: Folders of packages with their modification times.
    """

    python: str
    preload: Tuple[str, ...]
    env: Dict[str, str]
    folder: str
    packages: Tuple[Tuple[str, int], ...]


def make_spec(request: Message, env: Mapping[str, str], libraries: Sequence[str]) -> ServerSpec:
    """Returns the spec of a fork server.

    Args:
        request: As for :meth:`.NodeJob.prepare`.
        env, libraries: Its whole environment, and the folders of this interpreter's packages.
    """
    paths = env.get("PYTHONPATH", "").split(os.pathsep) if env.get("PYTHONPATH") else []
    has_relative = any(not path.startswith("/") for path in paths)
    variables = {name: value for name, value in env.items()
            if name not in LOGIN_VARIABLES and name != "PACELINE_JOB_TOKEN"}  # fmt: skip
    folders = dict.fromkeys([*libraries, *paths])
    return ServerSpec(
        request["python"],
        tuple(request["preload"]),
        variables,
        os.getcwd() if has_relative else "",
        tuple((path, _mtime_ns(path)) for path in folders),
    )


def login_variables(env: Mapping[str, str]) -> Dict[str, str]:
    """Returns the variables that differ from login to login."""
    return {name: env[name] for name in LOGIN_VARIABLES if name in env}


def _mtime_ns(path: str) -> int:
    """Modification time in nanoseconds; -1 if there is no such file."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


def list_sources(modules: Sequence[Any]) -> List[List[Any]]:
    """Returns files and times of modules outside package folders: editable installs and sources."""
    installed = tuple(path + os.sep for path in set(sysconfig.get_paths().values()))
    files = (getattr(module, "__file__", None) for module in modules)
    sources = {file for file in files if isinstance(file, str) and not file.startswith(installed)}
    return [[file, _mtime_ns(file)] for file in sorted(sources)]


class IdleServer(NamedTuple):
    """A fork server that has imported and has no ranks.

    Attributes:
        server, channel: The process, and the socket for its orders.
        token: In its environment and in that of its forks.
        spec, imported: What it was started with, and its report about the imports.
        sources: Imported files that may change without an installation.
    """

    server: "subprocess.Popen[bytes]"
    channel: "socket.socket"
    token: str
    spec: ServerSpec
    imported: Message
    sources: List[List[Any]]

    def matches(self, spec: ServerSpec) -> bool:
        """Whether it equals a newly started one."""
        alive = self.server.poll() is None
        return alive and self.spec == spec and all(_mtime_ns(f) == at for f, at in self.sources)

    def close(self) -> None:
        """Ends it."""
        self.channel.close()
        self.server.kill()
        self.server.wait()
        processes.kill_job(self.token, [os.getpid()], [])


class Resumable(NamedTuple):
    """What passes from one conversation of an agent to the next.

    Attributes:
        wake: Pipe that wakes the loop; threads of an earlier conversation may still write to it.
        stderr_pipe: The fork server's standard error.
        idle_server: The fork server, if there is one.
        folders: What it has imported from.
    """

    wake: Tuple[int, int]
    stderr_pipe: Tuple[int, int]
    idle_server: Optional[IdleServer]
    folders: "List[Path]"

    def close(self) -> None:
        """Ends what is left."""
        from .files import snapshot  # here: fork servers have no need of it

        if self.idle_server is not None:
            self.idle_server.close()
        for folder in self.folders:
            snapshot.discard_job_folder(folder)


class WarmWait:
    """The time between two conversations; the next launcher connects to ``place``."""

    def __init__(self, place: "ReconnectListener", seconds: float) -> None:
        self.place = place
        self._deadline = _boottime_s() + seconds

    def wait(
        self, resumable: Resumable, should_end: Callable[[], bool]
    ) -> "Optional[Tuple[Visit, Login]]":
        """Waits for the next launcher; ``None`` if the time is over or ``should_end()``.

        The fork server of ``resumable`` is dropped when it dies.
        """
        former_name = _process_name()
        processes.set_name(PROCESS_NAME)
        channel = resumable.idle_server.channel if resumable.idle_server is not None else None
        try:
            while not should_end() and _boottime_s() < self._deadline:
                poll = select.poll()
                place_fds = self.place.readers()
                server_fds = [channel.fileno()] if channel is not None else []
                for fd in [*place_fds, resumable.stderr_pipe[0], *server_fds]:
                    poll.register(fd, select.POLLIN)
                for fd, _ in poll.poll(POLL_S * 1000):
                    if fd == resumable.stderr_pipe[0]:
                        with contextlib.suppress(OSError):
                            os.read(fd, CHUNK_BYTES)  # nobody is there to hear it
                    elif fd in place_fds:
                        visit = self.place.readable(fd, 0)
                        login = None if visit is None else _receive_login(visit)
                        if visit is not None and login is not None:
                            return visit, login
                    elif channel is not None and not _is_alive(channel):
                        channel = None
        finally:
            self.place.close()
            processes.set_name(former_name)
        return None


def _receive_login(visit: "Visit") -> Optional[Login]:
    """Receives the visitor's login; closes visitors that send none."""
    received = bytearray()
    visit.holder.settimeout(LOGIN_TIMEOUT_S)
    try:
        while not received.endswith(b"\n"):
            data = visit.holder.recv(CHUNK_BYTES)
            received += data
            if not data or len(received) > MAX_LOGIN_BYTES:
                raise ValueError("no login")
        login = parse_login(bytes(received))
    except (OSError, ValueError):
        visit.streams.close()
        visit.holder.close()
        return None
    visit.holder.setblocking(False)
    return login


def _is_alive(channel: "socket.socket") -> bool:
    """Whether a fork server is at the other end; one without ranks says nothing."""
    try:
        return bool(channel.recv(CHUNK_BYTES))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _boottime_s() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _process_name() -> str:
    with contextlib.suppress(OSError), open("/proc/self/comm") as file:
        return file.read().rstrip("\n")
    return "python"
