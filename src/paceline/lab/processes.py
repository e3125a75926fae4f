"""Reads processes and sockets from /proc."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_ESTABLISHED, _LISTEN = "01", "0A"


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
    processes = (_read(Path(entry.path)) for entry in os.scandir("/proc") if entry.name.isdigit())
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


def _read(folder: Path) -> Process | None:
    try:
        status = _fields((folder / "status").read_text())
        command = (folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
        namespace = (folder / "ns" / "pid").stat().st_ino
    except (OSError, ValueError):  # it has ended, or belongs to another user
        return None
    return Process(
        pid=int(folder.name),
        inner=int(status["NSpid"].split()[-1]),
        parent=int(status["PPid"]),
        state=status["State"][0],
        command=command.decode(errors="replace") or f"[{status['Name']}]",
        namespace=namespace,
    )


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key: value.strip() for key, _, value in pairs}


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
