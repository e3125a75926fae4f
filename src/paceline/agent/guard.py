"""The guard: ends the job's processes when the agent dies without a word.

It holds the read end of a pipe whose write end only the agent has. Lines tell it what belongs to
the job; ``done`` lets it go; an end without ``done`` means that the agent was killed.
"""

from __future__ import annotations

import os
import signal
from typing import List

from . import procs


def main(fd: int) -> int:
    """Waits for the agent's end. Started in a session of its own."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    token = ""
    sessions: List[procs.Process] = []
    with os.fdopen(fd, "r") as lines:
        for line in lines:
            word, _, value = line.strip().partition(" ")
            if word == "token":
                token = value
            elif word == "session":
                pid, start = value.split()
                sessions.append(procs.Process(int(pid), int(start)))
            elif word == "done":
                return 0
    end_job(token, sessions)
    return 0


def end_job(token: str, sessions: List[procs.Process]) -> int:
    """Kills what runs in one of the job's sessions or carries the token; returns how many."""
    members = procs.in_sessions(sessions)
    killed = sum(procs.send(process, signal.SIGKILL) for process in members)
    return killed + procs.kill_job(token, roots=[], spare=[])
