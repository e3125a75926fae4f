"""Which address and interface each node uses for the job's traffic. Pure.

Decided from the nodes' own addresses and from connections that were really tried between them,
never from names: what a host name resolves to is shown to people and otherwise ignored.
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
ALL_PAIRS_LIMIT = 16  # hosts; beyond it each host tries rank 0's and its next neighbours
NEIGHBOURS = 8
_KIND_ORDER = ("hardware", "virtual", "wireless", "bridge", "tun")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An address that may carry the job's traffic."""

    host: str
    interface: str
    address: str
    family: int  # 4 or 6
    kind: str
    speed: int  # Mbit/s, -1 unknown
    prefix: int


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """What was decided for one node.

    Attributes:
        address: Address of the node that every other reaches.
        interface: Its interface.
        reason: Why this one, for people.
    """

    address: str
    interface: str
    reason: str


LOOPBACK = NodeNetwork("127.0.0.1", "lo", "the job stays on one machine")


def sources(facts: Facts) -> list[str] | None:
    """The addresses from which a host may connect to another; ``None`` if it told none."""
    links = facts.get("interfaces")
    if not links:
        return None
    return [str(a["address"]) for link in links for a in link["addresses"]
            if a["scope"] == "global"]  # fmt: skip


def candidates(
    hosts: Sequence[Host], facts: Mapping[str, Facts], interface: str | None
) -> tuple[dict[str, list[Candidate]], list[str]]:
    """The addresses worth trying on each host, and notes about those left out.

    Args:
        hosts: In rank order.
        facts: By host name, as the agents told them.
        interface: The interface asked for on all hosts; a host's own setting goes before it.
    """
    own = {host.name: _addresses(host, facts[host.name]) for host in hosts}
    _refuse_twins(hosts, facts, own)
    count = Counter(c.address for found in own.values() for c in found)
    notes = []
    for address, times in count.items():
        if times > 1:
            where = ", ".join(
                sorted({c.host for found in own.values() for c in found if c.address == address})
            )
            notes.append(f"{address} exists on {times} hosts ({where}): not used")
    kept = {}
    for host in hosts:
        unique = [c for c in own[host.name] if count[c.address] == 1]
        kept[host.name] = _restricted(host, unique, own[host.name], interface)
    return kept, notes


def same_machine(facts: Facts, others: Facts) -> bool:
    """Whether two hosts are one machine: one running kernel, one name, the same addresses.

    Containers on one machine differ in name or address; those that share its network do not, and
    cannot be told from it by anything that a job could use.
    """
    identity = _identity(facts)
    return identity is not None and identity == _identity(others)


def _identity(facts: Facts) -> tuple[str, str, frozenset[str]] | None:
    """Kernel, name and addresses; ``None`` where the kernel is not known."""
    if not facts.get("boot_id"):
        return None
    links = facts.get("interfaces") or []
    addresses = frozenset(a["address"] for link in links for a in link["addresses"])
    return str(facts["boot_id"]), facts["name"]["hostname"], addresses


def _refuse_twins(
    hosts: Sequence[Host], facts: Mapping[str, Facts], own: Mapping[str, Sequence[Candidate]]
) -> None:
    """NodeError when two hosts are one machine, unless each was given an address for the job."""
    machines: dict[tuple[str, str, frozenset[str]], Host] = {}
    for host in hosts:
        identity = _identity(facts[host.name])
        first = machines.setdefault(identity, host) if identity is not None else host
        if first is host or (host.job_address and first.job_address):
            continue
        has = ", ".join(f"{c.address} on {c.interface}" for c in own[host.name])
        raise NodeError(
            f"{first.name} and {host.name} are one machine",
            found=f"both are {facts[host.name]['name']['hostname']}"
            + (f", which has the address {has}" if has else ""),
            remedy=f"Name it once, with the number of its processes: {first.name} slots=2",
        )


def _addresses(host: Host, facts: Facts) -> list[Candidate]:
    found = []
    for link in facts["interfaces"] or []:
        if link["kind"] == "loopback" or link["state"] == "down":
            continue
        for a in link["addresses"]:
            if a["scope"] == "global" and a["usable"]:
                found.append(
                    Candidate(
                        host.name,
                        link["name"],
                        a["address"],
                        a["family"],
                        link["kind"],
                        link["speed"],
                        a["prefix"],
                    )
                )
    return found


def _restricted(
    host: Host, unique: list[Candidate], every: list[Candidate], interface: str | None
) -> list[Candidate]:
    """Applies what the user fixed; SettingError when the host has no such thing."""
    if host.job_address:
        fixed = [c for c in every if c.address == host.job_address]
        if not fixed:
            raise SettingError(
                f"{host.name} was given the address {host.job_address} for the job's traffic",
                found=f"{host.name} has: {_listed(every)}",
                remedy=f"Name one of these under [hosts.{host.name}] in paceline.toml",
            )
        return fixed
    wanted = host.interface or interface
    if wanted is None:
        return unique
    fixed = [c for c in every if c.interface == wanted]
    if not fixed:
        raise SettingError(
            f"interface {wanted} was asked for, but {host.name} has no usable address on it",
            found=f"{host.name} has: {_listed(every)}",
            remedy=f'--iface NAME, or interface = "NAME" under [hosts.{host.name}] in '
            "paceline.toml for this host alone",
        )
    if not any(c in unique for c in fixed):
        raise SettingError(
            f"interface {wanted} was asked for, but it cannot tell {host.name} from other hosts",
            found=f"its address {fixed[0].address} exists on several of them (a bridge?); "
            f"{host.name} has: {_listed(every)}",
            remedy="Leave --iface out, or name another",
        )
    return fixed


def _listed(found: Sequence[Candidate]) -> str:
    return ", ".join(f"{c.interface} {c.address}" for c in found) or "no usable address"


def pairs(names: Sequence[str]) -> dict[str, list[str]]:
    """Whom each host tries: everyone up to 16 hosts, else rank 0's host and its neighbours."""
    if len(names) <= ALL_PAIRS_LIMIT:
        return {name: [other for other in names if other != name] for name in names}
    tried = {}
    for at, name in enumerate(names):
        ring = [names[(at + step) % len(names)] for step in range(1, NEIGHBOURS + 1)]
        chosen = dict.fromkeys([names[0], *ring])
        chosen.pop(name, None)
        tried[name] = list(chosen)
    tried[names[0]] = [other for other in names if other != names[0]]
    return tried


def decide(
    hosts: Sequence[Host],
    found: Mapping[str, Sequence[Candidate]],
    tried: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[dict[str, NodeNetwork], list[str]]:
    """One address for every host that all who tried it have reached.

    Args:
        hosts: In rank order, two or more.
        found: Candidates by host.
        tried: By connecting host, the results of ``agent.probe.connect_all``.

    Returns:
        The choice by host, and notes.

    Raises:
        NodeError: A host cannot be reached by some other on any address, or no address family
            serves all hosts.
    """
    results = _by_target(tried)
    valid = {
        host.name: [c for c in found[host.name] if _reached_by_all(results.get(c.address, {}))]
        for host in hosts
    }
    for family in (4, 6):
        chosen = {
            host.name: _best([c for c in valid[host.name] if c.family == family], results)
            for host in hosts
        }
        if all(chosen.values()):
            sure = {name: c for name, c in chosen.items() if c is not None}
            return {n: _network(c) for n, c in sure.items()}, _route_notes(sure, results)
    raise _unreachable(hosts, found, results)


def only_choice(found: Sequence[Candidate], fixed: bool = True) -> NodeNetwork:
    """For a single node whose address or interface the user fixed, or which others may join."""
    if fixed:
        return NodeNetwork(found[0].address, found[0].interface, "as asked for")
    best = min(found, key=lambda c: (c.family, _kind(c), -c.speed), default=None)
    return NodeNetwork(best.address, best.interface, "for nodes to join") if best else LOOPBACK


Results = dict[str, dict[str, Mapping[str, Any]]]  # address -> connecting host -> result


def _by_target(tried: Mapping[str, Sequence[Mapping[str, Any]]]) -> Results:
    results: Results = {}
    for source, outcomes in tried.items():
        for outcome in outcomes:
            results.setdefault(outcome["address"], {})[source] = outcome
    return results


def _reached_by_all(outcomes: Mapping[str, Mapping[str, Any]]) -> bool:
    return bool(outcomes) and all(outcome["ok"] for outcome in outcomes.values())


def _best(valid: list[Candidate], results: Results) -> Candidate | None:
    """The least indirect kind first, then the fastest link, then the quickest answer."""

    def order(c: Candidate) -> tuple[int, int, float]:
        rtt = max(outcome["rtt"] for outcome in results[c.address].values())
        return (_kind(c), -c.speed, rtt)

    return min(valid, key=order, default=None)


def _kind(c: Candidate) -> int:
    return _KIND_ORDER.index(c.kind) if c.kind in _KIND_ORDER else len(_KIND_ORDER)


def _network(chosen: Candidate) -> NodeNetwork:
    return NodeNetwork(chosen.address, chosen.interface, "every node that tried has reached it")


def _route_notes(chosen: Mapping[str, Candidate], results: Results) -> list[str]:
    """Says where the kernel would leave by another address than the chosen one."""
    notes = []
    for target in chosen.values():
        for source, outcome in results[target.address].items():
            local = outcome.get("local_address")
            if local and local != chosen[source].address:
                notes.append(
                    f"{source} reaches {target.host} ({target.address}) from {local}, "
                    f"not from its chosen address {chosen[source].address}"
                )
    return notes


def _unreachable(
    hosts: Sequence[Host], found: Mapping[str, Sequence[Candidate]], results: Results
) -> NodeError:
    """Which host cannot be reached from where, on which address, and why; alike ones together."""
    lines: list[str] = []
    advice: list[str] = []
    for host in hosts:
        if not found[host.name]:
            lines.append(f"{host.name} has no address of its own but loopback")
            advice.append(f"Bring up a network interface on {host.name}")
        for candidate in found[host.name]:
            tried = results.get(candidate.address, {})
            alike: dict[str, list[str]] = {}
            for source, outcome in tried.items():
                if not outcome["ok"]:
                    alike.setdefault(explain_failure(outcome), []).append(source)
            for sources in alike.values():
                own = [_own(found.get(source, ()), candidate) for source in sources]
                advice.append(remedy_for(tried[sources[0]], host.name, sources, own))
            where = f"{host.name} at {candidate.address} ({candidate.interface})"
            lines += [f"{_some(sources)} → {where}: {why}" for why, sources in alike.items()]
    return NodeError(
        "the nodes cannot reach each other over TCP",
        found="\n".join(_first_of(lines)),
        remedy="\n".join(_first_of(list(dict.fromkeys(advice)))),
    )


SHOWN = 8  # lines of an error, and names in a line


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _first_of(lines: Sequence[str]) -> list[str]:
    more = [f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [*lines[:SHOWN], *more]


def explain_failure(outcome: Mapping[str, Any]) -> str:
    """One tried connection that failed, in words."""
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


def _own(candidates: Sequence[Candidate], target: Candidate) -> str:
    """The address from which a host calls another: its first of the same family."""
    six = ":" in target.address
    return next((one.address for one in candidates if (":" in one.address) == six), "")


def allow_from(addresses: Sequence[str]) -> str:
    """The commands that let these addresses through a host's firewall, for each kind of it."""
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
    """What to do about one tried connection that failed.

    Args:
        outcome: What became of it.
        host: Who was called.
        sources, addresses: Who called, and from where; an address is empty where it has none.
    """
    source, own = _some(sources), list(filter(None, addresses))
    code = outcome.get("errno")
    if code == errno.EBUSY:
        return f"Look at the load of {host}, and try again"
    if code in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"Give {source} a route to {host}: ip route get {outcome['address']} on {source}"
    if "reached" in outcome:
        return f"Give {host} an address of its own, or name its interface with --iface"
    if not own:
        return f"Give {source} an address that {host} can answer, or --iface for another network"
    return (
        f"Let {host} accept TCP from {source}, all ports (gloo and NCCL use random ones), or "
        f"--iface for another network\nOn {host}: {allow_from(own)}"
    )
