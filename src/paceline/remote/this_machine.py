"""The launching machine, which need not be Linux: its names, addresses, and processes.

Linux is asked through netlink and ``/proc``, as its agents ask; elsewhere psutil knows.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.agent import netlink, procs
from paceline.spec.hosts import Cluster

LINUX = sys.platform.startswith("linux")


def default_python(image: str | None = None) -> str:
    """The interpreter for hosts of which nothing is said: the one that runs this, if it may be.

    Args:
        image: Container image in which the job runs, if it does: it has a Python of its own.
    """
    return sys.executable if LINUX and not image else "python3"


def config_folder() -> Path:
    """Where paceline keeps what this user has trusted, and what shows that a file is the user's."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path("~/.config").expanduser()) / "paceline"


def mark_me(cluster: Cluster) -> Cluster:
    """Marks the host that is this very machine: no SSH to oneself."""
    if any(host.local for host in cluster.hosts):
        return cluster
    from paceline.hosts import find_local_host

    me = find_local_host(cluster, own_names(), {str(entry["address"]) for entry in addresses()})
    hosts = tuple(replace(host, local=host.name == me) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def own_names() -> set[str]:
    name = socket.gethostname()
    return {name, name.split(".")[0], "localhost"}


def addresses() -> list[dict[str, Any]]:
    """The addresses of every interface, as ``agent.netlink.addresses`` tells them."""
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

    plain = address.split("%")[0]  # a link-local address carries its interface
    known = ipaddress.ip_address(plain)
    scope = "host" if known.is_loopback else "link" if known.is_link_local else "global"
    return {"interface": interface, "address": plain, "family": family, "scope": scope,
            "usable": True}  # fmt: skip


def started(pid: int) -> float | None:
    """When a process began, by the system's own measure; ``None`` when it is gone.

    Two processes that ask here of the same pid get the same number as long as it is the same
    process.
    """
    if Path("/proc/self/stat").exists():
        process = procs.identify(pid)
        return None if process is None else process.start
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def has_open(pid: int, file: Path) -> bool:
    """Whether a process of this user has the file of exactly this name open."""
    import psutil

    name = str(file.parent.resolve() / file.name)  # a link may lead to any file
    try:
        return any(one.path == name for one in psutil.Process(pid).open_files())
    except (OSError, psutil.Error):
        return False


def started_by(leader: int) -> list[tuple[int, float]]:
    """The processes of a session, and those below its leader, each with when it began."""
    if Path("/proc/self/stat").exists():
        stats = procs.all_stats()
        pids = {stat.pid for stat in stats.values() if stat.session == leader}
        pids |= procs.descendants([leader], stats)
    else:
        import psutil

        pids = {pid for pid in psutil.pids() if _session(pid) == leader}
        with contextlib.suppress(psutil.Error):
            pids |= {one.pid for one in psutil.Process(leader).children(recursive=True)}
    return [(pid, began) for pid in sorted(pids) if (began := started(pid)) is not None]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def send(pid: int, start: float, signum: int) -> bool:
    """Signals exactly the process that began at ``start``; False when it is gone."""
    if started(pid) != start:
        return False
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True
