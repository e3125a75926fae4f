"""Reads processes and sockets from /proc."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ESTABLISHED, _LISTEN = "01", "0A"
_STATUS = re.compile(
    rb"Name:\t(.*)\n(?:.*\n)*?State:\t(.).*\n(?:.*\n)*?PPid:\t(\d+)\n(?:.*\n)*?NSpid:.*\t(\d+)\n"
)


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        pid: In the PID namespace of the reader.
        inner: In its own PID namespace.
        parent: Its parent in the PID namespace of the reader; 0 if that is outside.
        state: One letter, as in ``ps``.
        command: Its command line, words joined by blanks.
        namespace: Inode of its PID namespace.
    """

    pid: int
    inner: int
    parent: int
    state: str
    command: str
    namespace: int


def all_processes() -> list[Process]:
    """Every process that can be read."""
    return _read_all(skipped_namespace=0)


def processes_outside(namespace: int = 0) -> list[Process]:
    """Processes of other PID namespaces than the reader's, and those of ``namespace`` anyway."""
    own = Path("/proc/self/ns/pid").stat().st_ino
    return _read_all(own if own != namespace else 0)


def _read_all(skipped_namespace: int) -> list[Process]:
    names = filter(str.isdigit, os.listdir("/proc"))  # noqa: PTH208 - read often, and it is long
    processes = (_read(f"/proc/{name}", skipped_namespace) for name in names)
    return [process for process in processes if process is not None]


def of_host(processes: Iterable[Process], namespace: int) -> list[Process]:
    """Processes of a PID namespace and of those inside it, without zombies."""
    candidates = list(processes)
    pids = {process.pid for process in candidates if process.namespace == namespace}
    size = -1
    while size != len(pids):
        size = len(pids)
        pids |= {process.pid for process in candidates if process.parent in pids}
    return [process for process in candidates if process.pid in pids and process.state != "Z"]


def _read(folder: str, skipped_namespace: int) -> Process | None:
    try:
        namespace = os.stat(f"{folder}/ns/pid").st_ino  # noqa: PTH116 - three times as fast
        if namespace == skipped_namespace:
            return None
        status = _STATUS.match(_content(f"{folder}/status"))
        command = _content(f"{folder}/cmdline").rstrip(b"\0").replace(b"\0", b" ")
    except OSError:  # it has ended, or belongs to another user
        return None
    if status is None:
        return None
    name, state, parent, inner = (value.decode(errors="replace") for value in status.groups())
    return Process(
        pid=int(folder.rpartition("/")[2]),
        inner=int(inner),
        parent=int(parent),
        state=state,
        command=command.decode(errors="replace") or f"[{name}]",
        namespace=namespace,
    )


def _content(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - three times as fast
        return file.read()


def listeners(pid: int) -> list[str]:
    """Listening TCP sockets of a process's network, as ``address:port``, sorted."""
    addresses: list[str] = []
    for table in ("tcp", "tcp6"):
        file = Path(f"/proc/{pid}/net/{table}")
        if file.exists():
            addresses += parse_listeners(file.read_text())
    return sorted(addresses)


def connected() -> int:
    tables = (Path(f"/proc/self/net/{table}") for table in ("tcp", "tcp6"))
    return sum(parse_connected(table.read_text()) for table in tables if table.exists())


def parse_connected(table: str) -> int:
    """Established connections in the text of /proc/net/tcp or tcp6."""
    rows = (line.split() for line in table.splitlines()[1:])
    return sum(len(row) > 3 and row[3] == _ESTABLISHED for row in rows)


def parse_listeners(table: str) -> list[str]:
    """Listening sockets in the text of /proc/net/tcp or tcp6."""
    rows = (line.split() for line in table.splitlines()[1:])
    return [_address(row[1]) for row in rows if len(row) > 3 and row[3] == _LISTEN]


def _address(text: str) -> str:
    raw, _, port = text.partition(":")
    # groups of four bytes, each in the machine's byte order
    groups = [bytes.fromhex(raw[at : at + 8])[::-1] for at in range(0, len(raw), 8)]
    family = socket.AF_INET if len(groups) == 1 else socket.AF_INET6
    address = socket.inet_ntop(family, b"".join(groups))
    host = address if family == socket.AF_INET else f"[{address}]"
    return f"{host}:{int(port, 16)}"
