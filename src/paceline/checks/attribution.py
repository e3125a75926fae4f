"""Whose fault failed connections are. Pure.

A time-out alone does not say who does not hear whom: a host that hears nothing of its peer also
gets no answer from it. Half-open connections tell: a host that saw the first packet hears.
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
    """One host's fault towards some peers.

    Attributes:
        kind: ``no route``: the host cannot send to the peers. ``stranger``: somebody else answers
            at its address. ``refused`` and ``dropped``: it does not take what comes from them.
            ``silent``: neither hears the other.
        host: Whose fault it is.
        peers: Towards whom, in order.
        ports: Those of the tried ports that failed.
        every_port: All that were tried.
        words: The system's words, for ``no route``.
    """

    kind: Kind
    host: str
    peers: tuple[str, ...]
    ports: tuple[int, ...] = ()
    every_port: bool = True
    words: str = ""


@dataclass(slots=True)
class _Way:
    """What one host met when it tried another."""

    ok: list[int]
    bad: dict[str, list[int]]  # kind -> ports
    words: str = ""


def faults(results: Results, addresses: Mapping[str, str],
           half_open: Mapping[str, Sequence[Sequence[Any]]]) -> list[Fault]:  # fmt: skip
    """The faults behind the results, one a host and kind, gravest first.

    Args:
        results: By connecting host, results of ``agent.probe.connect_all``.
        addresses: By host, the address that was tried.
        half_open: By host, ``[port, peer address]`` of connections begun and not completed.
    """
    ways = {
        (source, target): way
        for source, outcomes in results.items()
        for target, way in _ways(outcomes).items()
    }
    seen = {name: {str(peer) for _, peer in peers} for name, peers in half_open.items()}
    single = [fault for pair in ways for fault in _of_pair(pair, ways, seen, addresses)]
    return _merged(single)


def _ways(outcomes: Sequence[Result]) -> dict[str, _Way]:
    found: dict[str, _Way] = {}
    for outcome in outcomes:
        way = found.setdefault(outcome["host"], _Way([], {}))
        if outcome["ok"] or outcome.get("errno") == errno.EBUSY:  # opened: no firewall drops it
            way.ok.append(outcome["port"])
            continue
        kind, words = _kind(outcome)
        way.bad.setdefault(kind, []).append(outcome["port"])
        way.words = words or way.words
    return found


def _kind(outcome: Result) -> tuple[Kind, str]:
    if outcome.get("reached"):
        return "stranger", ""
    code = outcome.get("errno")
    if code in _NO_ROUTE:
        return "no route", f"{outcome['error']} (errno {code})"
    return ("refused", "") if code in (errno.ECONNREFUSED, errno.ECONNRESET) else ("dropped", "")


def _of_pair(
    pair: tuple[str, str],
    ways: Mapping[tuple[str, str], _Way],
    seen: Mapping[str, set[str]],
    addresses: Mapping[str, str],
) -> list[Fault]:
    source, target = pair
    way, back = ways[pair], ways.get((target, source), _Way([], {}))
    found = []
    for kind, ports in way.bad.items():
        if kind == "dropped":
            found += _dropped(source, target, way, back, seen, addresses)
        elif kind == "no route":
            found.append(Fault("no route", source, (target,), tuple(ports), words=way.words))
        else:
            assert kind in ("refused", "stranger")
            exact: Kind = "refused" if kind == "refused" else "stranger"
            found.append(Fault(exact, target, (source,), tuple(sorted(ports)), not way.ok))
    return found


def _dropped(source: str, target: str, way: _Way, back: _Way, seen: Mapping[str, set[str]],
             addresses: Mapping[str, str]) -> list[Fault]:  # fmt: skip
    """Who does not hear, when ``source`` got no answer from ``target``."""
    ports = tuple(sorted(way.bad["dropped"]))
    if "no route" in back.bad:
        return []  # the target cannot answer: its own fault, told there
    arrived = addresses.get(source) in seen.get(target, set())
    if arrived and "dropped" in back.bad:
        return []  # the target hears, the source does not: told from the other side
    if arrived:
        return [Fault("dropped", source, (target,), ports, not way.ok)]
    deaf_too = "dropped" in back.bad and addresses.get(target) not in seen.get(source, set())
    if deaf_too and not way.ok and not back.ok:
        return [Fault("silent", *_ordered(source, target), ports, True)]
    return [Fault("dropped", target, (source,), ports, not way.ok)]


def _ordered(one: str, other: str) -> tuple[str, tuple[str, ...]]:
    first, second = sorted((one, other))
    return first, (second,)


def _merged(single: Sequence[Fault]) -> list[Fault]:
    """One fault a host and kind; what is silent towards several is that host's fault."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in dict.fromkeys(single):
        groups.setdefault((fault.kind, fault.host), []).append(fault)
    merged = [_one(group) for group in _without_echo(groups).values()]
    order = ("stranger", "no route", "refused", "dropped", "silent")
    return sorted(merged, key=lambda fault: (order.index(fault.kind), -len(fault.peers)))


def _without_echo(groups: dict[tuple[str, str], list[Fault]]) -> dict[Any, list[Fault]]:
    """Silent pairs that share a host are told once, of that host."""
    pairs = [fault for (kind, _), group in groups.items() if kind == "silent" for fault in group]
    rest = {key: group for key, group in groups.items() if key[0] != "silent"}
    count: dict[str, int] = {}
    for fault in pairs:
        for name in (fault.host, *fault.peers):
            count[name] = count.get(name, 0) + 1
    for fault in pairs:
        names = (fault.host, *fault.peers)
        guilty = max(names, key=lambda name: count[name])
        other = tuple(name for name in names if name != guilty)
        rest.setdefault(("silent", guilty), []).append(
            Fault("silent", guilty, other, fault.ports, fault.every_port)
        )
    return rest


def _one(group: Sequence[Fault]) -> Fault:
    first = group[0]
    peers = tuple(dict.fromkeys(peer for fault in group for peer in fault.peers))
    ports = tuple(sorted({port for fault in group for port in fault.ports}))
    return Fault(
        first.kind, first.host, peers, ports, all(f.every_port for f in group), first.words
    )


def presumed(found: Mapping[str, Sequence[Candidate]], tried: Results) -> dict[str, str]:
    """The address by which each host most likely ought to be reached; hosts without are left out.

    That which most others reached; else one in the network in which the others were reached;
    else the first.
    """
    reached: dict[str, int] = {}
    for outcomes in tried.values():
        for outcome in outcomes:
            reached[outcome["address"]] = reached.get(outcome["address"], 0) + bool(outcome["ok"])
    popular: dict[Any, int] = {}
    for candidates in found.values():
        for candidate in candidates:
            score = reached.get(candidate.address, 0)
            popular[_network(candidate)] = popular.get(_network(candidate), 0) + score
    return {
        name: max(
            own, key=lambda c: (reached.get(c.address, 0), popular[_network(c)], c.kind != "bridge")
        ).address
        for name, own in found.items()
        if own
    }


def _network(candidate: Candidate) -> Any:
    text = f"{candidate.address}/{candidate.prefix}"
    return ipaddress.ip_network(text, strict=False)
