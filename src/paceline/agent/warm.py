"""What an agent is between two commands of its user: nobody's yet, and ready for the next.

It waits at a place (see :mod:`.reconnection`) whose name and key only that user's launching machine
knows, with a fork server that has imported already, for so long as it was told, and then ends by
itself. It holds no connection, no listener of a network, no lease and no rank. Who meets it brings
a new login; for the ranks all is as if that had started the agent.
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

    from .reconnection import Met, Place

Message = Dict[str, Any]
FOLDER = "warm-"  # begins the names of jobs' folders that stay for the next command
NAME = "paceline-warm"  # of the process meanwhile, in the kernel's tables
TICK_S = 0.2
LOGIN_S = 5.0  # for what is told of a login
LONGEST_LOGIN = 4 << 20  # bytes of it
CHUNK = 1 << 16
# Variables that are another at each login and that no library looks at while it is imported: the
# ranks get those of the new login. Any other difference means another fork server.
OF_A_LOGIN = (
    "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "XDG_SESSION_ID", "SHLVL", "PWD",
    "OLDPWD", "_", "TERM", "COLUMNS", "LINES", "WINDOWID", "TMUX", "TMUX_PANE", "GPG_TTY",
)  # fmt: skip


class Login(NamedTuple):
    """What a process gets from the login that it is started under."""

    env: Dict[str, str]
    cwd: str
    umask: int

    def take(self) -> None:
        """Makes it this process's own."""
        os.environ.clear()
        os.environ.update(self.env)
        os.umask(self.umask)
        with contextlib.suppress(OSError):
            os.chdir(self.cwd)


def read_login(told: bytes) -> Login:
    """What ``again.py`` told. ValueError for anything else."""
    try:
        about = json.loads(told)
        env = {str(name): str(value) for name, value in about["env"].items()}
        return Login(env, str(about["cwd"]), int(about["umask"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("no login: %s" % error) from None


def umask() -> int:
    """This process's own."""
    found = os.umask(0o077)
    os.umask(found)
    return found


class Wanted(NamedTuple):
    """What a fork server is started with: one that has the same can take its place.

    Attributes:
        python, preload: The interpreter, and what it imports.
        env: All variables, but for those of a login and the job's token.
        folder: Where it was started, if that says where packages are.
        packages: When packages were last installed or removed: folders and times.
    """

    python: str
    preload: Tuple[str, ...]
    env: Dict[str, str]
    folder: str
    packages: Tuple[Tuple[str, int], ...]


def wanted(request: Message, env: Mapping[str, str], libraries: Sequence[str]) -> Wanted:
    """Of a request to prepare.

    Args:
        request: What :meth:`.job.NodeJob.prepare` takes.
        env: The whole environment that it comes to.
        libraries: Folders in which packages of this interpreter are installed.
    """
    paths = env.get("PYTHONPATH", "").split(os.pathsep) if env.get("PYTHONPATH") else []
    relative = any(not path.startswith("/") for path in paths)
    left = {name: value for name, value in env.items()
            if name not in OF_A_LOGIN and name != "PACELINE_JOB_TOKEN"}  # fmt: skip
    folders = dict.fromkeys([*libraries, *paths])
    return Wanted(
        request["python"],
        tuple(request["preload"]),
        left,
        os.getcwd() if relative else "",
        tuple((path, _changed(path)) for path in folders),
    )


def of_the_login(env: Mapping[str, str]) -> Dict[str, str]:
    """Those variables that every login has of its own."""
    return {name: env[name] for name in OF_A_LOGIN if name in env}


def _changed(path: str) -> int:
    """When a file or a folder was changed, in nanoseconds; -1 for none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


def sources(modules: Sequence[Any]) -> List[List[Any]]:
    """Files of modules that lie outside of the folders where packages are installed, with times.

    A package that somebody works on is changed without being installed again.
    """
    kept = tuple(path + os.sep for path in set(sysconfig.get_paths().values()))
    files = (getattr(module, "__file__", None) for module in modules)
    own = {file for file in files if isinstance(file, str) and not file.startswith(kept)}
    return [[file, _changed(file)] for file in sorted(own)]


class Kept:
    """A fork server that has imported and has no ranks.

    Attributes:
        server, channel: The process, and the socket by which it is told.
        token: In its environment, and in that of all that it forks.
        started: What it was started with.
        imported: What it said of its imports.
        sources: What it imported that may be changed without being installed.
    """

    def __init__(self, server: "subprocess.Popen[bytes]", channel: "socket.socket", token: str,
                 started: Wanted, imported: Message, sources: List[List[Any]]) -> None:  # fmt: skip
        self.server, self.channel, self.token = server, channel, token
        self.started, self.imported, self.sources = started, imported, sources

    def serves(self, asked: Wanted) -> bool:
        """Whether it is what a new one would be."""
        alive = self.server.poll() is None
        return alive and self.started == asked and all(_changed(f) == at for f, at in self.sources)

    def close(self) -> None:
        """Ends it."""
        self.channel.close()
        self.server.kill()
        self.server.wait()
        processes.kill_job(self.token, [os.getpid()], [])


class Lasting(NamedTuple):
    """What goes on from one conversation of an agent to the next.

    Attributes:
        wake: Pipe that wakes the loop; a thread of an earlier conversation may still write to it.
        words: Pipe for what the fork server writes.
        kept: The fork server, if there is one.
        folders: What it has imported from, and goes with it.
    """

    wake: Tuple[int, int]
    words: Tuple[int, int]
    kept: Optional[Kept]
    folders: "List[Path]"

    def close(self) -> None:
        """Ends what is left."""
        from .files import snapshot  # here: fork servers have no need of it

        if self.kept is not None:
            self.kept.close()
        for folder in self.folders:
            snapshot.discard_job_folder(folder)


class Rest:
    """The time between two conversations.

    Args:
        place: Where the next launcher comes.
        seconds: How long it may take.
    """

    def __init__(self, place: "Place", seconds: float) -> None:
        self.place = place
        self._until = _clock() + seconds

    def wait(self, lasting: Lasting, over: Callable[[], bool]) -> "Optional[Tuple[Met, Login]]":
        """Waits for the next launcher; ``None`` when the time is over, or something else is.

        Args:
            lasting: Whose fork server is given up when it dies.
            over: Asked whether to end now.
        """
        own_name = _name()
        processes.set_name(NAME)
        channel = lasting.kept.channel if lasting.kept is not None else None
        try:
            while not over() and _clock() < self._until:
                poll = select.poll()
                at_place = self.place.readers()
                for fd in [*at_place, lasting.words[0], *([channel.fileno()] if channel else [])]:
                    poll.register(fd, select.POLLIN)
                for fd, _ in poll.poll(TICK_S * 1000):
                    if fd == lasting.words[0]:
                        with contextlib.suppress(OSError):
                            os.read(fd, CHUNK)  # nobody is there to hear it
                    elif fd in at_place:
                        met = self.place.readable(fd, 0)
                        login = None if met is None else _login_of(met)
                        if met is not None and login is not None:
                            return met, login
                    elif channel is not None and not _is_there(channel):
                        channel = None
        finally:
            self.place.close()
            processes.set_name(own_name)
        return None


def _login_of(met: "Met") -> Optional[Login]:
    """What is told of the login by which somebody came; who tells nothing of use is left."""
    told = bytearray()
    met.holder.settimeout(LOGIN_S)
    try:
        while not told.endswith(b"\n"):
            data = met.holder.recv(CHUNK)
            told += data
            if not data or len(told) > LONGEST_LOGIN:
                raise ValueError("no login")
        login = read_login(bytes(told))
    except (OSError, ValueError):
        met.streams.close()
        met.holder.close()
        return None
    met.holder.setblocking(False)
    return login


def _is_there(channel: "socket.socket") -> bool:
    """Whether a fork server is at the other end; one without ranks says nothing."""
    try:
        return bool(channel.recv(CHUNK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _clock() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _name() -> str:
    with contextlib.suppress(OSError), open("/proc/self/comm") as file:
        return file.read().rstrip("\n")
    return "python"
