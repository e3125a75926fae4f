"""Chooses the address and interface of each node for the job's traffic.

The choice depends on the nodes' addresses and on probed connections, never on host names.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.spec.errors import NodeError, SettingError
from paceline.spec.hosts import Host

Facts = Mapping[str, Any]
ALL_PAIRS_LIMIT = 16  # hosts; beyond it each probes rank 0's host and its next neighbours
NEIGHBOURS = 8
_KIND_ORDER = ("hardware", "virtual", "wireless", "bridge", "tun")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible address for the job's traffic."""

    host: str
    interface: str
    address: str
    family: int  # 4 or 6
    kind: str
    speed: int  # Mbit/s, -1 unknown
    prefix: int


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """The choice for a node: an address that all others can reach, and the reason for people."""

    address: str
    interface: str
    reason: str


LOOPBACK = NodeNetwork("127.0.0.1", "lo", "the job stays on one machine")


MAX_SOURCES = 64  # of a host: programs cannot start with a variable of more than 128 KiB


def sources(facts: Facts, chosen: str = "") -> list[str] | None:
    """The addresses from which a host may connect to others; ``None`` if unknown.

    Of very many, these are the ``chosen`` one and those of the most direct interfaces.
    """
    links = facts.get("interfaces")
    if not links:
        return None
    kinds = {str(a["address"]): _kind_order(link["kind"]) for link in links
             for a in link["addresses"] if a["scope"] == "global"}  # fmt: skip
    if len(kinds) <= MAX_SOURCES:
        return [*kinds]
    return sorted(kinds, key=lambda address: (address != chosen, kinds[address]))[:MAX_SOURCES]


def candidates(
    hosts: Sequence[Host], facts: Mapping[str, Facts], interface: str | None
) -> tuple[dict[str, list[Candidate]], list[str]]:
    """The candidates of each host, and notes about unusable addresses.

    A host's own interface takes precedence over the requested one.
    """
    addresses = {host.name: _addresses(host, facts[host.name]) for host in hosts}
    _reject_duplicates(hosts, facts, addresses)
    flattened = [c for candidates in addresses.values() for c in candidates]
    count = Counter(c.address for c in flattened)
    notes = []
    for address, times in count.items():
        if times > 1:
            names = ", ".join(sorted({c.host for c in flattened if c.address == address}))
            notes.append(f"{address} exists on {times} hosts ({names}): not used")
    usable = {}
    for host in hosts:
        unique = [c for c in addresses[host.name] if count[c.address] == 1]
        usable[host.name] = _apply_settings(host, unique, addresses[host.name], interface)
    return usable, notes


def same_machine(first: Facts, second: Facts) -> bool:
    """Whether two hosts are one machine: the same kernel, name and addresses.

    Containers on one machine differ in name or address unless they share its network.
    """
    identity = _identity(first)
    return identity is not None and identity == _identity(second)


def _identity(facts: Facts) -> tuple[str, str, frozenset[str]] | None:
    """Boot id, name and addresses; ``None`` if the boot id is unknown."""
    if not facts.get("boot_id"):
        return None
    links = facts.get("interfaces") or []
    addresses = frozenset(a["address"] for link in links for a in link["addresses"])
    return str(facts["boot_id"]), facts["name"]["hostname"], addresses


def _reject_duplicates(
    hosts: Sequence[Host], facts: Mapping[str, Facts], addresses: Mapping[str, Sequence[Candidate]]
) -> None:
    """Raises NodeError if two hosts are one machine without job addresses of their own."""
    machines: dict[tuple[str, str, frozenset[str]], Host] = {}
    for host in hosts:
        identity = _identity(facts[host.name])
        first = machines.setdefault(identity, host) if identity is not None else host
        if first is host or (host.job_address and first.job_address):
            continue
        listed = ", ".join(f"{c.address} on {c.interface}" for c in addresses[host.name])
        raise NodeError(
            f"{first.name} and {host.name} are one machine",
            found=f"both are {facts[host.name]['name']['hostname']}"
            + (f", which has the address {listed}" if listed else ""),
            remedy=f"Name it once, with the number of its processes: {first.name} slots=2",
        )


def _addresses(host: Host, facts: Facts) -> list[Candidate]:
    return [
        Candidate(host.name, link["name"], a["address"], a["family"], link["kind"], link["speed"],
                  a["prefix"])
        for link in facts["interfaces"] or []
        if link["kind"] != "loopback" and link["state"] != "down"
        for a in link["addresses"]
        if a["scope"] == "global" and a["usable"]
    ]  # fmt: skip


def _apply_settings(
    host: Host, unique: list[Candidate], available: list[Candidate], interface: str | None
) -> list[Candidate]:
    """Applies the user's settings; raises SettingError if the host cannot satisfy them."""
    if host.job_address:
        fixed = [c for c in available if c.address == host.job_address]
        if not fixed:
            raise SettingError(
                f"{host.name} was given the address {host.job_address} for the job's traffic",
                found=f"{host.name} has: {_format_candidates(available)}",
                remedy=f"Name one of these under [hosts.{host.name}] in paceline.toml",
            )
        return fixed
    requested = host.interface or interface
    if requested is None:
        return unique
    fixed = [c for c in available if c.interface == requested]
    if not fixed:
        raise SettingError(
            f"interface {requested} was asked for, but {host.name} has no usable address on it",
            found=f"{host.name} has: {_format_candidates(available)}",
            remedy=f'--iface NAME, or interface = "NAME" under [hosts.{host.name}] in '
            "paceline.toml for this host alone",
        )
    if not any(c in unique for c in fixed):
        raise SettingError(
            f"interface {requested} was asked for, but it cannot tell {host.name} from other hosts",
            found=f"its address {fixed[0].address} exists on several of them (a bridge?); "
            f"{host.name} has: {_format_candidates(available)}",
            remedy="Leave --iface out, or name another",
        )
    return fixed


def _format_candidates(candidates: Sequence[Candidate]) -> str:
    return ", ".join(f"{c.interface} {c.address}" for c in candidates) or "no usable address"


def probe_targets(names: Sequence[str]) -> dict[str, list[str]]:
    """The hosts that each host probes: all up to 16, else rank 0's and its neighbours."""
    if len(names) <= ALL_PAIRS_LIMIT:
        return {name: [peer for peer in names if peer != name] for name in names}
    targets = {}
    for index, name in enumerate(names):
        ring = [names[(index + step) % len(names)] for step in range(1, NEIGHBOURS + 1)]
        targets[name] = [peer for peer in dict.fromkeys([names[0], *ring]) if peer != name]
    targets[names[0]] = [peer for peer in names if peer != names[0]]
    return targets


def decide(
    hosts: Sequence[Host],
    candidates: Mapping[str, Sequence[Candidate]],
    probes: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, NodeNetwork], list[str]]:
    """Chooses an address for each host that all probing hosts have reached.

    Args:
        hosts: In rank order, two or more.
        candidates: Candidates by host.
        probes: Results of ``agent.surveys.probe.connect_all`` by connecting host.

    Returns:
        The choice by host, and notes.

    Raises:
        NodeError: A host is unreachable from another, or no address family serves all hosts.
    """
    results = _by_target(probes)
    reason = "every node that tried has reached it"
    for family in (4, 6):
        fastest = {host.name: _fastest(candidates[host.name], family, results) for host in hosts}
        selected = {name: c for name, c in fastest.items() if c is not None}
        if len(selected) == len(hosts):
            networks = {name: NodeNetwork(c.address, c.interface, reason)
                        for name, c in selected.items()}  # fmt: skip
            return networks, _route_notes(selected, results)
    raise _unreachable(hosts, candidates, results)


def single_choice(candidates: Sequence[Candidate], fixed: bool = True) -> NodeNetwork:
    """The choice for a single node, as the user fixed it, or so that others can join."""
    if fixed:
        return NodeNetwork(candidates[0].address, candidates[0].interface, "as asked for")
    c = min(candidates, key=lambda c: (c.family, _kind(c), -c.speed), default=None)
    return NodeNetwork(c.address, c.interface, "for nodes to join") if c else LOOPBACK


Results = dict[str, dict[str, Mapping[str, Any]]]  # address -> connecting host -> result


def _by_target(probes: Mapping[str, Sequence[Mapping[str, Any]]]) -> Results:
    results: Results = {}
    for source, outcomes in probes.items():
        for outcome in outcomes:
            results.setdefault(outcome["address"], {})[source] = outcome
    return results


def _is_reachable(outcomes: Mapping[str, Mapping[str, Any]]) -> bool:
    return bool(outcomes) and all(outcome["ok"] for outcome in outcomes.values())


def _fastest(candidates: Sequence[Candidate], family: int, results: Results) -> Candidate | None:
    """Prefers the most direct kind, then the fastest link, then the shortest round trip."""

    def order(c: Candidate) -> tuple[int, int, float]:
        rtt = max(outcome["rtt"] for outcome in results[c.address].values())
        return (_kind(c), -c.speed, rtt)

    family_candidates = [c for c in candidates if c.family == family]
    reachable = [c for c in family_candidates if _is_reachable(results.get(c.address, {}))]
    return min(reachable, key=order, default=None)


def _kind(c: Candidate) -> int:
    return _kind_order(c.kind)


def _kind_order(kind: str) -> int:
    return _KIND_ORDER.index(kind) if kind in _KIND_ORDER else len(_KIND_ORDER)


def _route_notes(selected: Mapping[str, Candidate], results: Results) -> list[str]:
    """Notes for routes on which the kernel uses another source address than the chosen one."""
    notes = []
    for target in selected.values():
        for source, outcome in results[target.address].items():
            local = outcome.get("local_address")
            if local and local != selected[source].address:
                notes.append(
                    f"{source} reaches {target.host} ({target.address}) from {local}, "
                    f"not from its chosen address {selected[source].address}"
                )
    return notes


def _unreachable(
    hosts: Sequence[Host], candidates: Mapping[str, Sequence[Candidate]], results: Results
) -> NodeError:
    """Reports which hosts are unreachable from where, grouped by address and reason."""
    lines: list[str] = []
    advice: list[str] = []
    for host in hosts:
        if not candidates[host.name]:
            lines.append(f"{host.name} has no address of its own but loopback")
            advice.append(f"Bring up a network interface on {host.name}")
        for candidate in candidates[host.name]:
            outcomes = results.get(candidate.address, {})
            by_reason: dict[str, list[str]] = {}
            for source, outcome in outcomes.items():
                if not outcome["ok"]:
                    by_reason.setdefault(explain_failure(outcome), []).append(source)
            target = f"{host.name} at {candidate.address} ({candidate.interface})"
            for reason, sources in by_reason.items():
                addresses = [_source_address(candidates.get(s, ()), candidate) for s in sources]
                advice.append(remedy_for(outcomes[sources[0]], host.name, sources, addresses))
                lines.append(f"{_format_names(sources)} → {target}: {reason}")
    return NodeError(
        "the nodes cannot reach each other over TCP",
        found="\n".join(_truncate(lines)),
        remedy="\n".join(_truncate(list(dict.fromkeys(advice)))),
    )


MAX_LINES = 8  # lines of an error, and names in a line


def _format_names(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - MAX_LINES} more" if len(names) > MAX_LINES else ""
    return ", ".join(names[:MAX_LINES]) + suffix


def _truncate(lines: Sequence[str]) -> list[str]:
    suffix = [f"… and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return [*lines[:MAX_LINES], *suffix]


def explain_failure(outcome: Mapping[str, Any]) -> str:
    """Describes a failed probe."""
    if "reached" in outcome:
        return "another machine answered at that address"
    code = outcome.get("errno")
    if code == errno.ETIMEDOUT:
        return "no answer: packets are dropped (firewall) or the address is not routed"
    if code == errno.EBUSY:
        return "the connection was taken, but no agent answered: that machine is overloaded"
    if code == errno.ECONNREFUSED:
        return "refused: a firewall rejects it"
    return f"{outcome.get('error', 'failed')} (errno {code})"


def _source_address(candidates: Sequence[Candidate], target: Candidate) -> str:
    """A host's first address of the target's family."""
    is_ipv6 = ":" in target.address
    return next((c.address for c in candidates if (":" in c.address) == is_ipv6), "")


def allow_from(addresses: Sequence[str]) -> str:
    """Commands that open a host's firewall for these addresses, for each firewall tool."""
    family = "6" if ":" in addresses[0] else ""
    ufw = " && ".join(f"sudo ufw allow from {address}" for address in addresses)
    zone = " ".join(f"--add-source={address}" for address in addresses)
    return (
        f"sudo ip{family}tables -I INPUT -s {','.join(addresses)} -j ACCEPT\n"
        f"with ufw: {ufw}\n"
        f"with firewalld: sudo firewall-cmd --zone=trusted {zone}\n"
        "with nftables: sudo nft insert rule inet filter input "
        f"ip{family} saddr {{ {', '.join(addresses)} }} accept"
    )


def remedy_for(outcome: Mapping[str, Any], host: str, sources: Sequence[str],
               addresses: Sequence[str]) -> str:  # fmt: skip
    """What to do about a failed probe of ``host``; unknown ``addresses`` of sources are empty."""
    source, known_addresses = _format_names(sources), list(filter(None, addresses))
    code = outcome.get("errno")
    if code == errno.EBUSY:
        return f"Look at the load of {host}, and try again"
    if code in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"Give {source} a route to {host}: ip route get {outcome['address']} on {source}"
    if "reached" in outcome:
        return f"Give {host} an address of its own, or name its interface with --iface"
    if not known_addresses:
        return f"Give {source} an address that {host} can answer, or --iface for another network"
    return (
        f"Let {host} accept TCP from {source}, all ports (gloo and NCCL use random ones), or "
        f"--iface for another network\nOn {host}: {allow_from(known_addresses)}"
    )
