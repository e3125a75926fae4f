"""Which host of a cluster this machine is."""

from __future__ import annotations

from collections.abc import Collection

from paceline.hosts.address import canonical
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host

_STANDARD = (None, 22)
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


def find_me(cluster: Cluster, names: Collection[str], addresses: Collection[str]) -> str | None:
    """The name of the host that is this machine, or ``None`` if the launcher is none of them.

    Tried in this order: an address of this machine; one of its names, whole; its name without
    the domain, where only one of the two has a domain; a loopback address or name on the
    standard port (behind another port there may be a container or a tunnel). Loopback
    addresses of this machine never identify it: every machine has them. Of several hosts at
    one address only the one on the standard port can be this machine.

    HostsError when a loopback name stands beside another name of this machine.

    Args:
        cluster: The hosts as described.
        names: Host names of this machine, short or full.
        addresses: Its IP addresses.
    """
    mine = {canonical(a) for a in addresses if not _is_loopback(a)}
    called = {canonical(name) for name in names if not _is_loopback(name)}
    hosts = [host for host in cluster.hosts if not _behind_port(host, cluster)]
    short = [host for host in hosts if _same_but_domain(host, called)]
    loopback = [host for host in hosts if _is_loopback(host.address) and host.port in _STANDARD]
    tests = (
        [host for host in hosts if _spellings(host) & mine],
        [host for host in hosts if _spellings(host) & called],
        short if len(short) == 1 else [],
        loopback,
    )
    me = next((matches[0] for matches in tests if matches), None)
    if me is not None and loopback and me not in loopback:
        raise HostsError(
            f"{me.name} and {loopback[0].name} are both this machine",
            found=cluster.source,
            remedy=f"Name it once, with the number of its processes: {me.name} slots=2",
        )
    return me.name if me is not None else None


def _behind_port(host: Host, cluster: Cluster) -> bool:
    """Whether the host is one of several at an address, and not the one at the usual port."""
    same = [h for h in cluster.hosts if canonical(h.address) == canonical(host.address)]
    return len(same) > 1 and host.port not in _STANDARD


def _spellings(host: Host) -> set[str]:
    said = (host.address, host.job_address or host.address)
    return {canonical(text) for text in said} | {canonical(host.name)}


def _same_but_domain(host: Host, called: Collection[str]) -> bool:
    return any(_differ_in_domain(a, b) for a in _spellings(host) for b in called)


def _differ_in_domain(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    is_name = not short.isdigit() and ":" not in long
    return is_name and "." not in short and long.split(".")[0] == short


def _is_loopback(text: str) -> bool:
    plain = canonical(text)
    return plain in _LOOPBACK_NAMES or plain == "::1" or _is_127(plain)


def _is_127(text: str) -> bool:
    parts = text.split(".")
    return len(parts) == 4 and parts[0] == "127" and all(part.isdigit() for part in parts)
