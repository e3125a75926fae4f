"""``dial STATE HOST PORT``: ssh's way into the lab from outside.

Enters the lab's network, connects, and hands the connected socket to ssh (ProxyUseFdpass).
From then on ssh talks to the host over TCP with nothing of ours in between, so it sees resets,
time-outs and keep-alives as it would on a real network.
"""

from __future__ import annotations

import os
import re
import socket
import sys

from paceline.lab import kernel
from paceline.lab.control import GoneError, ask


def main(argv: list[str]) -> int:
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
    enter(fds, (kernel.CLONE_NEWUSER, kernel.CLONE_NEWNET))
    connection = socket.create_connection((host, port), timeout=_connect_timeout())
    connection.settimeout(None)
    return connection


def enter(fds: list[int], kinds: tuple[int, ...]) -> None:
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
