"""Which host of a cluster this machine is."""

from __future__ import annotations

from collections.abc import Callable, Collection

from paceline.cluster.inventory.address import canonical
from paceline.spec.hosts import Cluster, Host

_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


def find_me(cluster: Cluster, names: Collection[str], addresses: Collection[str]) -> str | None:
    """The name of the host that is this machine, or ``None`` if the launcher is none of them.

    Tried in this order: an address of this machine; one of its names, whole; its name without
    the domain, where only one of the two has a domain; a loopback address or name on the
    standard port (behind another port there may be a container or a tunnel). Loopback
    addresses of this machine never identify it: every machine has them.

    Args:
        cluster: The hosts as described.
        names: Host names of this machine, short or full.
        addresses: Its IP addresses.
    """
    mine = {canonical(a) for a in addresses if not _is_loopback(a)}
    called = {canonical(name) for name in names if not _is_loopback(name)}
    tests: list[Callable[[Host], bool]] = [
        lambda host: bool(_spellings(host) & mine),
        lambda host: bool(_spellings(host) & called),
        lambda host: any(_same_but_domain(a, b) for a in _spellings(host) for b in called),
        lambda host: _is_loopback(host.address) and host.port in (None, 22),
    ]
    matches = (host.name for test in tests for host in cluster.hosts if test(host))
    return next(matches, None)


def _spellings(host: Host) -> set[str]:
    # A described address wins over the name: `[hosts.n1] address = …` may rename n2.
    said = (host.address, host.job_address or host.address)
    return {canonical(text) for text in said} | {canonical(host.name)}


def _same_but_domain(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    is_name = not short.replace(".", "").isdigit() and ":" not in short
    return is_name and "." not in short and long.split(".")[0] == short


def _is_loopback(text: str) -> bool:
    plain = canonical(text)
    return plain in _LOOPBACK_NAMES or plain == "::1" or _is_127(plain)


def _is_127(text: str) -> bool:
    parts = text.split(".")
    return len(parts) == 4 and parts[0] == "127" and all(part.isdigit() for part in parts)
