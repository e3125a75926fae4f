"""Watches for pairs of hosts between which no packet arrives any more.

The agents' connections to the launcher may be sound then. Ranks notice only when TCP gives up,
after 15 seconds or, on older kernels, 15 minutes. But the kernel counts retransmissions. So while a
job is silent, its hosts list their unanswered connections
(:mod:`paceline.agent.surveys.retransmissions`), which sends nothing. If one stays unanswered for
some seconds, both hosts connect to each other, twice in two seconds. The link is blocked if neither
gets an answer and the connection stays unanswered. Packet loss, a cable unplugged for a moment and
a stateful firewall are something else.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launch.nodes.fleet import Fleet, Node, try_request

MIN_IDLE_S = 2.0  # without a step (or a CPU's work), before anybody is asked
POLL_S = 0.5  # between two questions, as long as some connection has no answer
MAX_POLL_S = 2.0  # the same, at most, while all have
UNANSWERED_S = 3.0  # for which a connection has no answer, before its hosts call each other
CALL_S = 2.0  # for an answer to a call: the kernel calls again after a second
TIMEOUT_S = 3.0  # for what an agent says
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

HostPair = tuple[str, str]  # two hosts, by name
ProbeResults = Mapping[tuple[str, str], Mapping[str, Any]]  # by who called whom, what came of it


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A connection on which something was sent again, and has no answer yet.

    Attributes:
        host, peer: Who sends to whom.
        number: Of the connection, on that host.
        times: How often it was sent again since the peer answered last.
    """

    host: str
    peer: str
    number: int
    times: int


class UnansweredLinks:
    """Tracks since when connections are unanswered. Pure."""

    def __init__(self) -> None:
        self._unanswered_at: dict[tuple[str, int], tuple[float, Unanswered]] = {}

    def __bool__(self) -> bool:
        return bool(self._unanswered_at)

    def update(self, connections: Sequence[Unanswered], timestamp: float) -> None:
        """Replaces the connections that are unanswered at this moment."""
        previous, self._unanswered_at = self._unanswered_at, {}
        for connection in connections:
            key = connection.host, connection.number
            first_seen_at, former = previous.get(key, (timestamp, connection))
            if connection.times < former.times:  # it was answered in between
                first_seen_at = timestamp
            self._unanswered_at[key] = (first_seen_at, connection)

    def forget(self) -> None:
        """Forgets all connections."""
        self._unanswered_at.clear()

    def overdue(self, timestamp: float) -> list[HostPair]:
        """Returns the pairs of hosts with a connection that is unanswered for too long."""
        return sorted({host_pair(connection.host, connection.peer)
                       for first_seen_at, connection in self._unanswered_at.values()
                       if timestamp - first_seen_at >= UNANSWERED_S})  # fmt: skip


def host_pair(host: str, peer: str) -> HostPair:
    """Returns the two names in alphabetical order."""
    return (host, peer) if host < peer else (peer, host)


def is_blocked(between: HostPair, called: ProbeResults) -> bool:
    """Returns whether neither of two hosts that connected to each other got an answer.

    Both are needed: a blocked direction stops the answers of the other one. A host that could not
    be asked proves nothing.
    """
    host, peer = between
    results = [called.get((host, peer)), called.get((peer, host))]
    return all(r and not r["ok"] and r.get("errno") in _NO_ANSWER for r in results)


def describe_pairs(lines: Sequence[HostPair]) -> str:
    """Describes blocked links to the user."""
    names = [f"{host} and {peer}" for host, peer in lines[:3]]
    remainder = [f"{len(lines) - 3} more pairs of hosts"] if len(lines) > 3 else []
    return (f"{', '.join([*names, *remainder])} cannot reach each other: what one sends does not"
            " reach the other (paceline check tries each direction)")  # fmt: skip


class LinkWatch:
    """Watches the links between hosts while the job is silent.

    Args:
        addresses: Returns the hosts' current addresses for the job's traffic.
        host_at: Returns the host that has an address; empty if none has.
        idle_s: Returns for how many seconds the job has given no sign.
        on_blocked: Called with the blocked pairs and the seconds of silence.
    """

    def __init__(self, fleet: Fleet, addresses: Callable[[], Mapping[str, str]],
                 host_at: Callable[[str], str], idle_s: Callable[[], float],
                 on_blocked: Callable[[list[HostPair], float], None]) -> None:  # fmt: skip
        self._fleet, self._addresses, self._host_at = fleet, addresses, host_at
        self._idle_s, self._on_blocked = idle_s, on_blocked
        self._unanswered = UnansweredLinks()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        pause_s = POLL_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s, idle_s = POLL_S, self._idle_s()
            if idle_s < MIN_IDLE_S or len(self._nodes) < 2:
                self._unanswered.forget()
                continue
            await self._check(idle_s)
            if not self._unanswered:
                pause_s = min(MAX_POLL_S, max(POLL_S, idle_s / 10))

    async def _check(self, idle_s: float) -> None:
        suspects = await self._poll()
        if not suspects:
            return
        called = await self._probe(suspects)
        unanswered = await self._poll()
        lines = [pair for pair in suspects if pair in unanswered and is_blocked(pair, called)]
        self._unanswered.forget()
        if lines and self._idle_s() > idle_s:  # else it has gone on meanwhile
            self._on_blocked(lines, self._idle_s())

    @property
    def _nodes(self) -> list[Node]:
        return [node for node in self._fleet.nodes if node.running and not node.lost]

    async def _poll(self) -> list[HostPair]:
        """Queries all hosts; returns pairs with a connection that is unanswered for too long."""
        nodes = self._nodes
        answers = await asyncio.gather(*(_request(node, "unanswered") for node in nodes))
        connections = [
            Unanswered(node.name, peer, int(number), int(times))
            for node, answer in zip(nodes, answers, strict=True)
            for address, number, times in answer.get("connections", ())
            if (peer := self._host_at(str(address))) not in ("", node.name)
        ]
        timestamp = time.monotonic()
        self._unanswered.update(connections, timestamp)
        return self._unanswered.overdue(timestamp)

    async def _probe(self, lines: Sequence[HostPair]) -> ProbeResults:
        """Lets the two hosts of each pair connect to each other."""
        addresses, nodes = self._addresses(), {node.name: node for node in self._nodes}
        pairs = [pair for pair in lines if {*pair} <= {*addresses} & {*nodes}]
        ears = sorted({host for pair in pairs for host in pair})
        opened = await asyncio.gather(*(
            _request(nodes[host], "hear", address=addresses[host], seconds=CALL_S + TIMEOUT_S)
            for host in ears
        ))  # fmt: skip
        ports = {host: answer["port"] for host, answer in zip(ears, opened, strict=True) if answer}

        async def call(source: str) -> list[Mapping[str, Any]]:
            peers = [host for pair in pairs if source in pair for host in pair if host != source]
            targets = [
                {"host": host, "address": addresses[host], "port": ports[host],
                 "identity": nodes[host].channel.identity}
                for host in peers if host in ports
            ]  # fmt: skip
            answer = await _request(nodes[source], "connect", CALL_S + TIMEOUT_S, targets=targets,
                                timeout_s=CALL_S, settle_s=CALL_S)  # fmt: skip
            return list(answer.get("results", ()))

        answers = await asyncio.gather(*map(call, ears))
        return {
            (source, str(pair["host"])): pair
            for source, results in zip(ears, answers, strict=True)
            for pair in results
        }


async def _request(node: Node, op: str, wait_s: float = TIMEOUT_S, **fields: Any) -> Any:
    """Returns an agent's answer; empty if there is none."""
    return await try_request(node, op, wait_s, **fields) or {}
