"""Talking to a lab's owner: one JSON line there, one back, file descriptors on the side."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

NAMESPACES = ("user", "pid", "net", "ipc", "uts", "mnt")  # in the order in which to enter them


class GoneError(Exception):
    """Nobody answers: the lab is down."""


def ask(path: str, request: dict[str, Any], timeout: float = 60.0) -> tuple[Any, list[int]]:
    """Sends ``request`` to the owner listening at ``path``.

    Returns:
        The answer and the descriptors that came with it.

    Raises:
        GoneError: Nobody listens.
        OSError: Something else failed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            raise GoneError(path) from None
        connection.sendall(json.dumps(request).encode() + b"\n")
        return _receive(connection)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    data, fds, _, _ = socket.recv_fds(connection, 65536, len(NAMESPACES))
    while data and not data.endswith(b"\n"):
        more = connection.recv(65536)
        if not more:
            break
        data += more
    if not data:
        raise GoneError("the owner ended")
    return json.loads(data), fds


def answer(connection: socket.socket, reply: Any, fds: list[int]) -> None:
    """The owner's side of :func:`ask`."""
    data = json.dumps(reply).encode() + b"\n"
    if fds:
        sent = socket.send_fds(connection, [data], fds)
        data = data[sent:]
    connection.sendall(data)


def namespaces_of(pid: int) -> list[int]:
    """Descriptors of a process's namespaces, in the order of :data:`NAMESPACES`."""
    return [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in NAMESPACES]
