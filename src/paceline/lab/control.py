"""The protocol of a lab's owner: a JSON line each way, and file descriptors with the reply."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

NAMESPACES = ("user", "pid", "net", "ipc", "uts", "mnt")  # in the order in which to enter them


class GoneError(Exception):
    """The lab is down."""


def send_request(
    path: str, request: dict[str, Any], timeout: float = 60.0
) -> tuple[Any, list[int]]:
    """Sends ``request`` to the owner listening at ``path``; returns its reply and descriptors.

    Raises:
        GoneError: The lab is down.
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
        chunk = connection.recv(65536)
        if not chunk:
            break
        data += chunk
    if not data:
        raise GoneError("the owner ended")
    return json.loads(data), fds


def send_reply(connection: socket.socket, reply: Any, fds: list[int]) -> None:
    """The owner's side of :func:`send_request`."""
    data = json.dumps(reply).encode() + b"\n"
    if fds:
        num_sent = socket.send_fds(connection, [data], fds)
        data = data[num_sent:]
    connection.sendall(data)


def namespaces_of(pid: int) -> list[int]:
    """Descriptors of a process's namespaces, in the order of :data:`NAMESPACES`."""
    return [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in NAMESPACES]
