"""The launching machine: its names, addresses and processes.

Uses netlink and ``/proc`` on Linux, as the agents do, and psutil elsewhere.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.agent.supervision import processes
from paceline.agent.surveys import netlink
from paceline.spec.hosts import Cluster

LINUX = sys.platform.startswith("linux")


def default_python(image: str | None = None) -> str:
    """The default interpreter of hosts: this one on Linux, unless an image has its own."""
    return sys.executable if LINUX and not image else "python3"


def config_folder() -> Path:
    """Folder for the user's trust decisions and signing key."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path("~/.config").expanduser()) / "paceline"


def mark_local(cluster: Cluster) -> Cluster:
    """Marks the host that is this machine, which needs no SSH."""
    if any(host.local for host in cluster.hosts):
        return cluster
    from paceline.hosts import find_local_host

    me = find_local_host(cluster, local_names(), {str(entry["address"]) for entry in addresses()})
    hosts = tuple(replace(host, local=host.name == me) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def user_at_host() -> str:
    """This user and machine, as ``user@machine``; a container's user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def local_names() -> set[str]:
    name = socket.gethostname()
    return {name, name.split(".")[0], "localhost"}


def addresses() -> list[dict[str, Any]]:
    """The addresses of all interfaces, as from ``agent.surveys.netlink.addresses``."""
    with contextlib.suppress(AttributeError, OSError):  # some containers have no netlink either
        return netlink.addresses()
    import psutil

    families = {int(socket.AF_INET): 4, int(socket.AF_INET6): 6}
    return [
        _address(interface, families[int(entry.family)], entry.address)
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if int(entry.family) in families
    ]


def _address(interface: str, family: int, address: str) -> dict[str, Any]:
    import ipaddress

    bare = address.split("%")[0]  # a link-local address contains its interface
    parsed = ipaddress.ip_address(bare)
    scope = "host" if parsed.is_loopback else "link" if parsed.is_link_local else "global"
    return {"interface": interface, "address": bare, "family": family, "scope": scope,
            "usable": True}  # fmt: skip


def start_time(pid: int) -> float | None:
    """Start time of a process in the system's unit; ``None`` if it does not exist."""
    if Path("/proc/self/stat").exists():
        process = processes.identify(pid)
        return None if process is None else process.start
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def has_open(pid: int, file: Path) -> bool:
    """Whether a process of this user has the file open under exactly this path."""
    import psutil

    name = str(file.parent.resolve() / file.name)  # a link may lead to any file
    try:
        return any(opened.path == name for opened in psutil.Process(pid).open_files())
    except (OSError, psutil.Error):
        return False


def session_processes(leader: int) -> list[tuple[int, float]]:
    """The processes of a session and its leader's descendants, with their start times."""
    if Path("/proc/self/stat").exists():
        stats = processes.all_stats()
        pids = {stat.pid for stat in stats.values() if stat.session == leader}
        pids |= processes.descendants([leader], stats)
    else:
        import psutil

        pids = {pid for pid in psutil.pids() if _session(pid) == leader}
        with contextlib.suppress(psutil.Error):
            pids |= {child.pid for child in psutil.Process(leader).children(recursive=True)}
    return [(pid, start) for pid in sorted(pids) if (start := start_time(pid)) is not None]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def signal_process(pid: int, start: float, signum: int) -> bool:
    """Signals the process that started at ``start``; False if it no longer exists."""
    if start_time(pid) != start:
        return False
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True
