"""Finds the host of a cluster that is this machine."""

from __future__ import annotations

from collections.abc import Collection

from paceline.hosts.address import canonical_address, parse_ip
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host

_SSH_PORTS = (None, 22)
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


def find_local_host(
    cluster: Cluster, names: Collection[str], addresses: Collection[str]
) -> str | None:
    """Returns the name of the host that is this machine, or ``None``.

    Compares in this order: addresses; full names; names without the domain, if only one of the
    two has a domain; a loopback address or name on the standard port (behind another port may be
    a container or a tunnel). Loopback addresses of this machine never identify it. Of several
    hosts at one address only the one on the standard port can be this machine.

    ``names`` are this machine's, short or full. Raises HostsError if a loopback name is listed
    together with another name of this machine.
    """
    own_addresses = {canonical_address(a) for a in addresses if not _is_loopback(a)}
    own_names = {canonical_address(name) for name in names if not _is_loopback(name)}
    hosts = [host for host in cluster.hosts if not _is_forwarded(host, cluster)]
    domain_matches = [host for host in hosts if _matches_without_domain(host, own_names)]
    loopback = [host for host in hosts if _is_loopback(host.address) and host.port in _SSH_PORTS]
    tests = (
        [host for host in hosts if _canonical_names(host) & own_addresses],
        [host for host in hosts if _canonical_names(host) & own_names],
        domain_matches if len(domain_matches) == 1 else [],
        loopback,
    )
    match = next((matches[0] for matches in tests if matches), None)
    if match is not None and loopback and match not in loopback:
        raise HostsError(
            f"{match.name} and {loopback[0].name} are both this machine",
            found=cluster.source,
            remedy=f"Name it once, with the number of its processes: {match.name} slots=2",
        )
    return match.name if match is not None else None


def _is_forwarded(host: Host, cluster: Cluster) -> bool:
    """Whether the host is one of several at an address, and not on the standard port."""
    addresses = [canonical_address(other.address) for other in cluster.hosts]
    is_shared = addresses.count(canonical_address(host.address)) > 1
    return is_shared and host.port not in _SSH_PORTS


def _canonical_names(host: Host) -> set[str]:
    texts = (host.name, host.address, host.job_address or host.address)
    return {canonical_address(text) for text in texts}


def _matches_without_domain(host: Host, own_names: Collection[str]) -> bool:
    return any(_differ_in_domain(a, b) for a in _canonical_names(host) for b in own_names)


def _differ_in_domain(first: str, second: str) -> bool:
    short_name, long_name = sorted((first, second), key=len)
    is_name = not short_name.isdigit() and ":" not in long_name
    return is_name and "." not in short_name and long_name.split(".")[0] == short_name


def _is_loopback(text: str) -> bool:
    ip = parse_ip(text)
    return canonical_address(text) in _LOOPBACK_NAMES if ip is None else ip.is_loopback
