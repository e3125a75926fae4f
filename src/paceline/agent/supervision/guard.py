"""The guard, the agent's parent: kills what is left of the job when the agent ends.

Orphans go to the nearest ancestor that adopts them: the agent, then the guard. So no process of the
job escapes both. If the guard itself is killed, the agent notices and ends the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from typing import List

from . import processes

ERRORS_CHANGED = signal.SIGUSR1  # tells the guard that a new standard error was sent
HANDLED = (ERRORS_CHANGED, signal.SIGTERM)  # blocked while the guard's interpreter starts
MAX_STOPPED_S = 1.0  # after which a stopped agent is continued


class GuardErrors:
    """Sends the guard a new standard error, because the first login may have ended."""

    def __init__(self) -> None:
        self._sender, self.receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (self._sender, self.receiver):
            end.setblocking(False)  # some platforms ignore the flags of send_fds and recv_fds

    def redirect(self, fd: int) -> None:
        """Sends a descriptor; it replaces one that the guard has not taken yet."""
        with contextlib.suppress(OSError):
            for stale in _pending_descriptors(self.receiver):
                os.close(stale)
            socket.send_fds(self._sender, [b"e"], [fd])

    def notify(self) -> None:
        """Makes the guard switch over; the former login cannot end while its stream is open."""
        with contextlib.suppress(OSError):
            os.kill(os.getppid(), ERRORS_CHANGED)


def _pending_descriptors(channel: socket.socket) -> List[int]:
    """Receives all descriptors that have arrived."""
    descriptors: List[int] = []
    with contextlib.suppress(OSError):  # no more
        while fds := socket.recv_fds(channel, 1, 1)[1]:
            descriptors += fds
    return descriptors


def fork_agent(package: str) -> GuardErrors:
    """Forks and returns in the child, the agent; the parent becomes the guard by ``exec``."""
    processes.adopt_orphans()  # survives exec; the child does not inherit it
    errors = GuardErrors()
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # survives exec, until the handlers are set
    agent = os.fork()
    if agent:
        errors.receiver.set_inheritable(True)
        # -B: the agent and its folder may be gone before the guard has read its own code
        argv = [sys.executable, "-I", "-S", "-B", package, "guard", str(agent)]
        os.execv(argv[0], [*argv, str(errors.receiver.fileno())])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    return errors


def main(agent: int, errors: int) -> int:
    """Waits for the agent's end, kills the processes that it left, and exits with its status.

    ``errors``: descriptor on which the agent passes new standard errors.
    """
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _forward_term(agent))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # so that the stream ends when the agent ends
        os.dup2(null, fd)
    os.close(null)
    channel = socket.socket(fileno=errors)

    def take_errors(*_: object) -> None:
        for fd in _pending_descriptors(channel):
            os.dup2(fd, 2)
            os.close(fd)

    signal.signal(ERRORS_CHANGED, take_errors)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    status = _wait_for(agent)
    take_errors()
    processes.kill_job("", roots=[os.getpid()], spared=[])
    if os.WIFSIGNALED(status):  # the agent could not report it
        name = signal.Signals(os.WTERMSIG(status)).name
        with contextlib.suppress(OSError):  # the reader may be gone
            os.write(2, b"paceline guard: the agent was killed by %s\n" % name.encode())
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _forward_term(agent: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(agent, signal.SIGTERM)


def _wait_for(agent: int) -> int:
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)  # other pids are adopted orphans
        if pid == agent and os.WIFSTOPPED(status):
            # a stopped agent cannot watch its lease
            time.sleep(MAX_STOPPED_S)
            os.kill(agent, signal.SIGCONT)
        elif pid == agent:
            return status
