"""Attributes failed connections to hosts. Pure.

A time-out alone does not show which direction is blocked. Half-open connections do: a host with
one has received the first packet.
"""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.remote.network import Candidate

Result = Mapping[str, Any]
Results = Mapping[str, Sequence[Result]]
Kind = Literal["no route", "stranger", "refused", "dropped", "silent"]
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one host towards some peers.

    Attributes:
        kind: ``no route``: the host cannot send to the peers. ``stranger``: another machine answers
            at its address. ``refused`` and ``dropped``: it rejects or drops the peers' packets.
            ``silent``: packets vanish in both directions.
        host: The host at fault.
        peers: The peers concerned, in order.
        ports: The tried ports that failed.
        is_every_port: Whether all tried ports failed.
        error: The system's error message, for ``no route``.
    """

    kind: Kind
    host: str
    peers: tuple[str, ...]
    ports: tuple[int, ...] = ()
    is_every_port: bool = True
    error: str = ""


@dataclass(slots=True)
class _Link:
    """Results of one host's connections to another."""

    open_ports: list[int]
    failed_ports: dict[str, list[int]]  # kind -> ports
    error: str = ""


def faults(results: Results, addresses: Mapping[str, str],
           half_open: Mapping[str, Sequence[Sequence[Any]]]) -> list[Fault]:  # fmt: skip
    """Returns the faults behind the results, one for each host and kind, gravest first.

    Args:
        results: Results of ``agent.probe.connect_all``, by connecting host.
        addresses: The address that was tried, by host.
        half_open: ``[port, peer address]`` of connections that were not completed, by host.
    """
    links = {
        (source, target): link
        for source, outcomes in results.items()
        for target, link in _links(outcomes).items()
    }
    observed_peers = {name: {str(peer) for _, peer in peers} for name, peers in half_open.items()}
    pair_faults = [
        fault for pair in links for fault in _pair_faults(pair, links, observed_peers, addresses)
    ]
    return _merge_faults(pair_faults)


def _links(outcomes: Sequence[Result]) -> dict[str, _Link]:
    links: dict[str, _Link] = {}
    for outcome in outcomes:
        link = links.setdefault(outcome["host"], _Link([], {}))
        if outcome["ok"] or outcome.get("errno") == errno.EBUSY:  # opened: no firewall drops it
            link.open_ports.append(outcome["port"])
            continue
        failure, error = _kind(outcome)
        link.failed_ports.setdefault(failure, []).append(outcome["port"])
        link.error = error or link.error
    return links


def _kind(outcome: Result) -> tuple[Kind, str]:
    if outcome.get("reached"):
        return "stranger", ""
    code = outcome.get("errno")
    if code in _NO_ROUTE:
        return "no route", f"{outcome['error']} (errno {code})"
    return ("refused", "") if code in (errno.ECONNREFUSED, errno.ECONNRESET) else ("dropped", "")


def _pair_faults(
    pair: tuple[str, str],
    links: Mapping[tuple[str, str], _Link],
    observed_peers: Mapping[str, set[str]],
    addresses: Mapping[str, str],
) -> list[Fault]:
    source, target = pair
    link, reverse = links[pair], links.get((target, source), _Link([], {}))
    faults = []
    for kind, ports in link.failed_ports.items():
        if kind == "dropped":
            faults += _drop_faults(source, target, link, reverse, observed_peers, addresses)
        elif kind == "no route":
            faults.append(Fault("no route", source, (target,), tuple(ports), error=link.error))
        else:
            assert kind in ("refused", "stranger")
            fault_kind: Kind = "refused" if kind == "refused" else "stranger"
            faults.append(
                Fault(fault_kind, target, (source,), tuple(sorted(ports)), not link.open_ports)
            )
    return faults


def _drop_faults(source: str, target: str, link: _Link, reverse: _Link, observed_peers: Mapping[str, set[str]],
             addresses: Mapping[str, str]) -> list[Fault]:  # fmt: skip
    """Returns whose firewall drops packets, if ``target`` did not answer ``source``."""
    ports = tuple(sorted(link.failed_ports["dropped"]))
    if "no route" in reverse.failed_ports:
        return []  # the target cannot answer; reported as its own fault
    target_receives = addresses.get(source) in observed_peers.get(target, set())
    if target_receives and "dropped" in reverse.failed_ports:
        return []  # the source drops the answers; reported for the reverse link
    if target_receives:
        return [Fault("dropped", source, (target,), ports, not link.open_ports)]
    source_receives_nothing = "dropped" in reverse.failed_ports and addresses.get(
        target
    ) not in observed_peers.get(source, set())
    if source_receives_nothing and not link.open_ports and not reverse.open_ports:
        return [Fault("silent", min(source, target), (max(source, target),), ports, True)]
    return [Fault("dropped", target, (source,), ports, not link.open_ports)]


def _merge_faults(faults: Sequence[Fault]) -> list[Fault]:
    """Merges the faults of each host and kind."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in dict.fromkeys(faults):
        groups.setdefault((fault.kind, fault.host), []).append(fault)
    merged = [_merge_group(group) for group in _group_silent_pairs(groups).values()]
    order = ("stranger", "no route", "refused", "dropped", "silent")
    return sorted(merged, key=lambda fault: (order.index(fault.kind), -len(fault.peers)))


def _group_silent_pairs(groups: dict[tuple[str, str], list[Fault]]) -> dict[Any, list[Fault]]:
    """Attributes silent pairs that share a host to that host."""
    pairs = [fault for (kind, _), group in groups.items() if kind == "silent" for fault in group]
    regrouped = {key: group for key, group in groups.items() if key[0] != "silent"}
    count: dict[str, int] = {}
    for fault in pairs:
        for name in (fault.host, *fault.peers):
            count[name] = count.get(name, 0) + 1
    for fault in pairs:
        names = (fault.host, *fault.peers)
        culprit = max(names, key=lambda name: count[name])
        peers = tuple(name for name in names if name != culprit)
        regrouped.setdefault(("silent", culprit), []).append(
            Fault("silent", culprit, peers, fault.ports, fault.is_every_port)
        )
    return regrouped


def _merge_group(group: Sequence[Fault]) -> Fault:
    first = group[0]
    peers = tuple(dict.fromkeys(peer for fault in group for peer in fault.peers))
    ports = tuple(sorted({port for fault in group for port in fault.ports}))
    return Fault(
        first.kind, first.host, peers, ports, all(f.is_every_port for f in group), first.error
    )


def likely_addresses(
    candidates_by_host: Mapping[str, Sequence[Candidate]], attempts: Results
) -> dict[str, str]:
    """Returns the address that most likely reaches each host; hosts without addresses are left out.

    Prefers the address that most others reached, then one in the network where others were reached.
    """
    successes: dict[str, int] = {}
    for outcomes in attempts.values():
        for outcome in outcomes:
            successes[outcome["address"]] = successes.get(outcome["address"], 0) + bool(
                outcome["ok"]
            )
    network_scores: dict[Any, int] = {}
    for candidates in candidates_by_host.values():
        for candidate in candidates:
            score = successes.get(candidate.address, 0)
            network_scores[_network(candidate)] = network_scores.get(_network(candidate), 0) + score
    return {
        name: max(
            host_candidates,
            key=lambda c: (
                successes.get(c.address, 0),
                network_scores[_network(c)],
                c.kind != "bridge",
            ),
        ).address
        for name, host_candidates in candidates_by_host.items()
        if host_candidates
    }


def _network(candidate: Candidate) -> Any:
    text = f"{candidate.address}/{candidate.prefix}"
    return ipaddress.ip_network(text, strict=False)
