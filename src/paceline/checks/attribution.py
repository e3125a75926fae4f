"""Attributes failed connections to hosts. Pure.

A time-out alone does not show which direction is blocked. Half-open connections do: a host with
one has received the first packet.
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.remote.network import Candidate

Result = Mapping[str, Any]
Results = Mapping[str, Sequence[Result]]
Pair = tuple[str, str]
Kind = Literal["no route", "stranger", "refused", "dropped", "silent"]
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one host towards some peers.

    Attributes:
        kind: ``no route``: the host cannot send to the peers. ``stranger``: another machine answers
            at its address. ``refused`` and ``dropped``: it rejects or drops the peers' packets.
            ``silent``: packets vanish in both directions.
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
    failed_ports: dict[Kind, list[int]]
    error: str = ""


def faults(results: Results, addresses: Mapping[str, str],
           half_open: Mapping[str, Sequence[Sequence[Any]]]) -> list[Fault]:  # fmt: skip
    """Returns the faults behind the results, one for each host and kind, gravest first.

    Args:
        results: Results of ``agent.surveys.probe.connect_all``, by connecting host.
        addresses: The address that was tried, by host.
        half_open: ``[port, peer address]`` of connections that were not completed, by host.
    """
    links = {
        (source, target): link
        for source, outcomes in results.items()
        for target, link in _links(outcomes).items()
    }
    observed_peers = {name: {str(peer) for _, peer in peers} for name, peers in half_open.items()}
    received = {
        (source, target): addresses.get(source) in observed_peers.get(target, ())
        for source, target in itertools.permutations({name for pair in links for name in pair}, 2)
    }
    return _merge_faults([fault for pair in links for fault in _pair_faults(pair, links, received)])


def _links(outcomes: Sequence[Result]) -> dict[str, _Link]:
    """Returns a host's links to others, by target."""
    links: dict[str, _Link] = {}
    for outcome in outcomes:
        link = links.setdefault(outcome["host"], _Link([], {}))
        if outcome["ok"] or outcome.get("errno") == errno.EBUSY:  # opened: no firewall drops it
            link.open_ports.append(outcome["port"])
            continue
        kind, error = _kind(outcome)
        link.failed_ports.setdefault(kind, []).append(outcome["port"])
        link.error = error or link.error
    return links


def _kind(outcome: Result) -> tuple[Kind, str]:
    if outcome.get("reached"):
        return "stranger", ""
    code = outcome.get("errno")
    if code in _NO_ROUTE:
        return "no route", f"{outcome['error']} (errno {code})"
    return ("refused", "") if code in (errno.ECONNREFUSED, errno.ECONNRESET) else ("dropped", "")


def _pair_faults(pair: Pair, links: Mapping[Pair, _Link],
                 received: Mapping[Pair, bool]) -> list[Fault]:  # fmt: skip
    source, target = pair
    link, reverse = links[pair], links.get((target, source), _Link([], {}))
    faults = []
    for kind, failed_ports in link.failed_ports.items():
        ports, is_every_port = tuple(sorted(failed_ports)), not link.open_ports
        if kind == "no route":
            faults.append(Fault(kind, source, (target,), ports, error=link.error))
        elif kind != "dropped":
            faults.append(Fault(kind, target, (source,), ports, is_every_port))
        elif "no route" in reverse.failed_ports:
            pass  # the target cannot answer; reported as its own fault
        elif received[pair] and "dropped" in reverse.failed_ports:
            pass  # the source drops the answers; reported for the reverse link
        elif received[pair]:
            faults.append(Fault(kind, source, (target,), ports, is_every_port))
        elif ("dropped" in reverse.failed_ports and not received[target, source]
              and is_every_port and not reverse.open_ports):  # fmt: skip
            faults.append(Fault("silent", min(pair), (max(pair),), ports))
        else:
            faults.append(Fault(kind, target, (source,), ports, is_every_port))
    return faults


def _merge_faults(faults: Sequence[Fault]) -> list[Fault]:
    """Merges the faults of each host and kind; attributes silent pairs to a shared host."""
    unique = list(dict.fromkeys(faults))
    silent_pairs = Counter(
        name for fault in unique if fault.kind == "silent" for name in (fault.host, *fault.peers)
    )
    groups: dict[tuple[Kind, str], list[Fault]] = {}
    for fault in unique:
        host, peers = fault.host, fault.peers
        if fault.kind == "silent":
            host = max((host, *peers), key=silent_pairs.__getitem__)
            peers = tuple(name for name in (fault.host, *fault.peers) if name != host)
        groups.setdefault((fault.kind, host), []).append(replace(fault, host=host, peers=peers))
    merged = [
        replace(
            group[0],
            peers=tuple(dict.fromkeys(peer for fault in group for peer in fault.peers)),
            ports=tuple(sorted({port for fault in group for port in fault.ports})),
            is_every_port=all(fault.is_every_port for fault in group),
        )
        for group in groups.values()
    ]
    order = ("stranger", "no route", "refused", "dropped", "silent")
    return sorted(merged, key=lambda fault: (order.index(fault.kind), -len(fault.peers)))


def likely_addresses(candidates_by_host: Mapping[str, Sequence[Candidate]],
                     attempts: Results) -> dict[str, str]:  # fmt: skip
    """Returns the address that most likely reaches each host; hosts without addresses are left out.

    Prefers the address that most others reached, then one in the network where others were reached.
    """
    successes: Counter[str] = Counter()
    for outcomes in attempts.values():
        successes.update(outcome["address"] for outcome in outcomes if outcome["ok"])
    network_scores: Counter[Any] = Counter()
    for candidates in candidates_by_host.values():
        for candidate in candidates:
            network_scores[_network(candidate)] += successes[candidate.address]

    def score(candidate: Candidate) -> tuple[int, int, bool]:
        network_score = network_scores[_network(candidate)]
        return successes[candidate.address], network_score, candidate.kind != "bridge"

    return {name: max(candidates, key=score).address
            for name, candidates in candidates_by_host.items() if candidates}  # fmt: skip


def _network(candidate: Candidate) -> Any:
    return ipaddress.ip_network(f"{candidate.address}/{candidate.prefix}", strict=False)
