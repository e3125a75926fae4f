"""The two ways into a lab from outside, each a small program that starts quickly.

``dial STATE HOST PORT`` is ssh's. It enters the lab's network, connects, and hands the connected
socket to ssh (ProxyUseFdpass). From then on ssh talks to the host over TCP with nothing of ours in
between, so it sees resets, time-outs and keep-alives as it would on a real network.

``run STATE HOST FOLDER COMMAND…`` runs a command on a host as a child of the caller. It joins the
host's namespaces, so no ssh is involved. Signals are passed on, the exit status comes back, and the
command dies with this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import sys
from types import FrameType

from paceline.lab import kernel
from paceline.lab.control import GoneError, ask

# --- dial


def dial(argv: list[str]) -> int:
    state, host, port = argv
    try:
        connection = _connect(state, host, int(port))
    except GoneError:
        print(f"paceline lab: no lab runs in {state}", file=sys.stderr)
        return 1
    except OSError as error:
        # In ssh's words: whoever reads ssh's messages finds the one for a direct connection.
        reason = os.strerror(error.errno) if error.errno else "Connection timed out"
        print(f"ssh: connect to host {host} port {port}: {reason}", file=sys.stderr)
        return 1
    _hand_over(connection)
    return 0


def _connect(state: str, host: str, port: int) -> socket.socket:
    _, fds = ask(f"{state}/control.sock", {"do": "network"})
    join(fds, (kernel.CLONE_NEWUSER, kernel.CLONE_NEWNET))
    connection = socket.create_connection((host, port), timeout=_connect_timeout())
    connection.settimeout(None)
    return connection


def join(fds: list[int], kinds: tuple[int, ...]) -> None:
    """Enters namespaces; the user namespace only where it is not ours already."""
    for fd, kind in zip(fds, kinds, strict=True):
        if kind != kernel.CLONE_NEWUSER or not _same(fd, "/proc/self/ns/user"):
            kernel.setns(fd, kind)
        os.close(fd)


def _same(fd: int, path: str) -> bool:
    return os.fstat(fd).st_ino == os.stat(path).st_ino  # noqa: PTH116 - quick start


def _connect_timeout() -> float | None:
    """ssh's ConnectTimeout, which it cannot apply to a program that dials for it."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:  # noqa: PTH123
            given = re.search(rb"ConnectTimeout[= ](\d+)", file.read(), re.IGNORECASE)
    except OSError:
        return None
    return float(given[1]) if given else None


def _hand_over(connection: socket.socket) -> None:
    with socket.socket(fileno=os.dup(1)) as ssh:
        socket.send_fds(ssh, [b"\0"], [connection.fileno()])


# --- run


_KINDS = (
    kernel.CLONE_NEWUSER,
    kernel.CLONE_NEWPID,
    kernel.CLONE_NEWNET,
    kernel.CLONE_NEWIPC,
    kernel.CLONE_NEWUTS,
    kernel.CLONE_NEWNS,
)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def run(argv: list[str]) -> int:
    state, host, folder, *command = argv
    try:
        answer, fds = ask(f"{state}/control.sock", {"do": "enter", "host": host})
    except GoneError:
        print(f"paceline lab: no lab runs in {state}", file=sys.stderr)
        return 255
    if "error" in answer:
        print(f"paceline lab: {answer['error']['message']}", file=sys.stderr)
        return 255
    join(fds, _KINDS)
    return _supervise(folder, command)


def _supervise(folder: str, command: list[str]) -> int:
    alive, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held)
        _become(folder, command, alive)
    _pass_signals(child)
    os.close(alive)
    status = os.waitpid(child, 0)[1]
    return _end_like(status)


def _become(folder: str, command: list[str], alive: int) -> None:
    kernel.die_with_parent()
    if select.select([alive], [], [], 0)[0]:  # the parent had died before we asked
        os._exit(1)
    environment = _environment()
    for place in (folder, environment.get("HOME", "/"), "/"):
        if place and _go(place):
            break
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 - no shell is the point
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _go(folder: str) -> bool:
    try:
        os.chdir(folder)
    except OSError:
        return False
    return True


def _environment() -> dict[str, str]:
    """The environment as it was given to us: Python may have added LC_CTYPE to os.environ."""
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _pass_signals(child: int) -> None:
    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # timeout(1) signals twice: it may be gone
            os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, forward)
    on_terminal = os.isatty(0)  # then the terminal itself signals the child as well
    for number in _FROM_TERMINAL:
        signal.signal(number, signal.SIG_IGN if on_terminal else forward)


def _end_like(status: int) -> int:
    """Ends as the command ended: with its exit status or by its signal."""
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    number = os.WTERMSIG(status)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
