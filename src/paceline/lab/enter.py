"""Two small programs that enter a lab from outside.

``dial STATE HOST PORT`` is used by ssh. It enters the lab's network, connects, and sends the
connected socket to ssh (ProxyUseFdpass). Then ssh talks to the host over TCP directly, and sees
resets, time-outs and keep-alives as on a real network.

``run STATE HOST FOLDER COMMAND…`` runs a command on a host as a child of the caller. It joins the
host's namespaces, without ssh. It forwards signals and the exit status, and the command dies with
it.
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
from paceline.lab.control import GoneError, send_request


def dial(argv: list[str]) -> int:
    state, host, port = argv
    try:
        connection = _connect(state, host, int(port))
    except GoneError:
        print(f"paceline lab: no lab runs in {state}", file=sys.stderr)
        return 1
    except OSError as error:
        # the same message as ssh's own, because paceline parses ssh's messages
        reason = os.strerror(error.errno) if error.errno else "Connection timed out"
        print(f"ssh: connect to host {host} port {port}: {reason}", file=sys.stderr)
        return 1
    with socket.socket(fileno=os.dup(1)) as ssh:
        socket.send_fds(ssh, [b"\0"], [connection.fileno()])
    return 0


def _connect(state: str, host: str, port: int) -> socket.socket:
    _, fds = send_request(f"{state}/control.sock", {"do": "network"})
    join(fds, (kernel.CLONE_NEWUSER, kernel.CLONE_NEWNET))
    connection = socket.create_connection((host, port), timeout=_connect_timeout())
    connection.settimeout(None)
    return connection


def join(fds: list[int], kinds: tuple[int, ...]) -> None:
    """Enters namespaces; the user namespace only if this process is not in it."""
    namespace = os.stat("/proc/self/ns/user").st_ino  # noqa: PTH116 - quick start
    for fd, kind in zip(fds, kinds, strict=True):
        if kind != kernel.CLONE_NEWUSER or os.fstat(fd).st_ino != namespace:
            kernel.setns(fd, kind)
        os.close(fd)


def _connect_timeout() -> float | None:
    """ssh's ConnectTimeout, which ssh does not apply to a ProxyCommand."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:  # noqa: PTH123
            match = re.search(rb"ConnectTimeout[= ](\d+)", file.read(), re.IGNORECASE)
    except OSError:
        return None
    return float(match[1]) if match else None


_KINDS = (
    kernel.CLONE_NEWUSER,
    kernel.CLONE_NEWPID,
    kernel.CLONE_NEWNET,
    kernel.CLONE_NEWIPC,
    kernel.CLONE_NEWUTS,
    kernel.CLONE_NEWNS,
)
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def run(argv: list[str]) -> int:
    state, host, folder, *command = argv
    try:
        reply, fds = send_request(f"{state}/control.sock", {"do": "enter", "host": host})
    except GoneError:
        print(f"paceline lab: no lab runs in {state}", file=sys.stderr)
        return 255
    if "error" in reply:
        print(f"paceline lab: {reply['error']['message']}", file=sys.stderr)
        return 255
    join(fds, _KINDS)
    return _supervise(folder, command)


def _supervise(folder: str, command: list[str]) -> int:
    parent_alive, parent_end = os.pipe()
    # until this process can forward them: the command may be faster, and its caller, too
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED_SIGNALS, *_TERMINAL_SIGNALS})
    child = os.fork()
    if child == 0:
        os.close(parent_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _exec_command(folder, command, parent_alive)
    _forward_signals(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(parent_alive)
    return _exit_like(os.waitpid(child, 0)[1])


def _exec_command(folder: str, command: list[str], parent_alive: int) -> None:
    kernel.die_with_parent()
    if select.select([parent_alive], [], [], 0)[0]:  # the parent had died before
        os._exit(1)
    environment = _environment()
    for candidate in filter(None, (folder, environment.get("HOME", "/"), "/")):
        with contextlib.suppress(OSError):
            os.chdir(candidate)
            break
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 - no shell is the point
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _environment() -> dict[str, str]:
    """The initial environment: Python may have added LC_CTYPE to os.environ."""
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _forward_signals(child: int) -> None:
    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # timeout(1) signals twice
            os.kill(child, number)

    for number in _FORWARDED_SIGNALS:
        signal.signal(number, forward)
    on_terminal = os.isatty(0)  # then the terminal signals the child itself
    for number in _TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN if on_terminal else forward)


def _exit_like(status: int) -> int:
    """Ends like the command: with its exit status or by its signal."""
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    number = os.WTERMSIG(status)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
