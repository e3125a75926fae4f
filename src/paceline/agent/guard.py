"""The guard: the agent's parent. Whatever becomes of the agent, nothing of the job outlives it.

The kernel hands orphans to their nearest ancestor that asked for them: to the agent while it lives,
then to the guard. So no process of the job gets away from both, whatever session, environment or
parent it chose. When the guard itself is killed, the agent notices and ends the job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import List

from . import procs

STOPPED_S = 1.0  # how long the agent may stand still


def fork_agent(package: str) -> None:
    """Splits this process in two: returns in the agent, while the guard goes its own way.

    Args:
        package: Folder that this code lies in; the guard is a fresh interpreter of it.
    """
    procs.adopt_orphans()  # kept over exec, not handed to the child
    agent = os.fork()
    if agent == 0:
        return
    # -B: the agent may be gone, and its folder with it, before this one has read its own code
    argv = [sys.executable, "-I", "-S", "-B", package, "guard", str(agent)]
    os.execv(argv[0], argv)


def main(agent: int) -> int:
    """Waits for the agent's end; ends what it left; ends as it did."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(agent, signal.SIGTERM))
    _let_go([0, 1])
    status = _wait_for(agent)
    if os.WIFSIGNALED(status):  # it could say nothing itself
        sys.stderr.write("paceline guard: the agent was killed by %s\n" % _name(status))
        sys.stderr.flush()
    procs.kill_job("", roots=[os.getpid()], spare=[])
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _name(status: int) -> str:
    return signal.Signals(os.WTERMSIG(status)).name


def _let_go(fds: List[int]) -> None:
    """The stream to the launcher is the agent's: it must end when the agent ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nothing, fd)
    os.close(nothing)


def _wait_for(agent: int) -> int:
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)  # others are orphans that were handed to us
        if pid == agent and os.WIFSTOPPED(status):
            # nobody would keep the lease; in a host that is frozen as a whole we do not get here
            time.sleep(STOPPED_S)
            os.kill(agent, signal.SIGCONT)
        elif pid == agent:
            return status
