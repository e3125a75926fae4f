"""Hands a new login's standard streams to a living agent (see ``reconnection.py``).

Sent over standard input to ``python -c``, like ``bootstrap.py``. It stays, because the login ends
with it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import sys

CONNECT_TIMEOUT_S = 5


def connect_agent(name: str) -> socket.socket:
    """Connects to this user's agent. OSError if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # blocking: it waits for room if other users have filled the agent's queue
    limit = struct.pack("@ll", CONNECT_TIMEOUT_S, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.connect("\0" + name)
    connection.settimeout(CONNECT_TIMEOUT_S)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("3i", credentials)[1] != os.getuid():
        raise ConnectionRefusedError("somebody else's")
    return connection


def describe_login() -> bytes:
    """Environment, folder and umask of this login, for an agent that began under another."""
    mask = os.umask(0o077)
    os.umask(mask)
    try:
        cwd = os.getcwd()
    except OSError:  # it was removed
        cwd = "/"
    return json.dumps({"env": dict(os.environ), "cwd": cwd, "umask": mask}).encode() + b"\n"


def attach(name: str, is_new_use: bool = False) -> None:
    """Gives our streams to the agent, and keeps none of them.

    Args:
        name: Of the agent's socket.
        is_new_use: It waits for the next command rather than the rest of one: send it this login.
    """
    try:
        connection = connect_agent(name)
    except ConnectionRefusedError:
        os.write(1, b"\xf5PLboot gone\n")
        sys.exit(3)
    streams = array.array("i", [0, 1, 2])
    connection.sendmsg([b"m"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if is_new_use:
        connection.sendall(describe_login())
    connection.settimeout(None)
    with contextlib.suppress(OSError):
        connection.recv(1)  # until the agent lets us go, or has gone
    sys.exit(0)
