"""What runs on a node to meet its living agent again (see ``reconnection.py``).

Its source is sent over standard input to ``python -c``, like that of ``bootstrap.py``: the remote
command is the same, and what it is about stands in no command line. It hands its standard streams
over to the agent and stays, for the login ends with it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import sys

PATIENCE_S = 5.0


def agent_at(name: str) -> socket.socket:
    """A connection to the agent, whose owner is this very user. OSError when there is none."""
    there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    there.settimeout(PATIENCE_S)
    there.connect("\0" + name)
    who = there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("3i", who)[1] != os.getuid():
        raise ConnectionRefusedError("somebody else's")
    return there


def login() -> bytes:
    """What this login gives to who is started under it, for an agent that began under another."""
    mask = os.umask(0o077)
    os.umask(mask)
    try:
        cwd = os.getcwd()
    except OSError:  # it was removed
        cwd = "/"
    return json.dumps({"env": dict(os.environ), "cwd": cwd, "umask": mask}).encode() + b"\n"


def meet(name: str, anew: bool = False) -> None:
    """Gives our streams to the agent, and keeps none of them.

    Args:
        name: Where it waits.
        anew: It waits for the next command, not for the rest of one: it is told of this login.
    """
    try:
        there = agent_at(name)
    except ConnectionRefusedError:
        os.write(1, b"\xf5PLboot gone\n")
        sys.exit(3)
    streams = array.array("i", [0, 1, 2])
    there.sendmsg([b"m"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    if anew:
        there.sendall(login())
    there.settimeout(None)
    with contextlib.suppress(OSError):
        there.recv(1)  # until the agent lets us go, or has gone
    sys.exit(0)
