"""``enter STATE HOST FOLDER COMMAND…``: runs a command on a host as a child of the caller.

It joins the host's namespaces, so no ssh is involved. Signals are passed on, the exit status
comes back, and the command dies with this process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from types import FrameType

from paceline.lab import kernel
from paceline.lab.control import GoneError, ask
from paceline.lab.dial import enter

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


def main(argv: list[str]) -> int:
    state, host, folder, *command = argv
    try:
        answer, fds = ask(f"{state}/control.sock", {"do": "enter", "host": host})
    except GoneError:
        print(f"paceline lab: no lab runs in {state}", file=sys.stderr)
        return 255
    if "error" in answer:
        print(f"paceline lab: {answer['error']['message']}", file=sys.stderr)
        return 255
    enter(fds, _KINDS)
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
