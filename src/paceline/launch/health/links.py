"""Lines between hosts that let nothing through for good, in one direction or in both.

The agents' own lines to the launcher may be sound then, so nobody is missed. Ranks see it only when
TCP gives their connections up, after a quarter of a minute, or of an hour with an older kernel. But
what has no answer is sent again, and the kernel counts that. So while a job is silent its hosts are
asked for such connections (:mod:`paceline.agent.lines`), which costs them a look at a table and
sends nothing. Where one stays without an answer for some seconds, both of its hosts call each
other, twice in two seconds. A line is deaf when neither has an answer, and that connection none
either: lost packets, a cable that is pulled for a moment and a firewall that knows only old or
only new connections are something else.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.launch.nodes.fleet import Fleet, Node
from paceline.spec.errors import PacelineError

SILENT_S = 2.0  # without a step (or a CPU's work), before anybody is asked
LOOK_S = 0.5  # between two questions, as long as some connection has no answer
SELDOM_S = 2.0  # the same, at most, while all have
UNANSWERED_S = 3.0  # for which a connection has no answer, before its hosts call each other
CALL_S = 2.0  # for an answer to a call: the kernel calls again after a second
PATIENCE_S = 3.0  # for what an agent says
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

Line = tuple[str, str]  # two hosts, by name
Called = Mapping[tuple[str, str], Mapping[str, Any]]  # by who called whom, what came of it


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


class Silences:
    """Since when which lines have not answered. Pure."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], tuple[float, Unanswered]] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def heard(self, connections: Sequence[Unanswered], now: float) -> None:
        """All connections without an answer at this moment."""
        before, self._since = self._since, {}
        for connection in connections:
            since, was = before.get((connection.host, connection.number), (now, connection))
            answered = connection.times < was.times
            self._since[connection.host, connection.number] = (
                now if answered else since,
                connection,
            )

    def forget(self) -> None:
        """The job goes on, or it is asked afresh."""
        self._since.clear()

    def due(self, now: float) -> list[Line]:
        """The lines that have been silent for so long that they are to be tried."""
        late = (
            connection for since, connection in self._since.values() if now - since >= UNANSWERED_S
        )
        return sorted({line(connection.host, connection.peer) for connection in late})


def line(host: str, peer: str) -> Line:
    """The line between two hosts."""
    return (host, peer) if host < peer else (peer, host)


def deaf(between: Line, called: Called) -> bool:
    """Whether neither of two hosts that called each other had an answer.

    In both directions: who is called and hears it answers what does not arrive. Who could not be
    asked says nothing against the line.
    """
    host, peer = between
    results = [called.get(way) for way in ((host, peer), (peer, host))]
    return all(
        result and not result["ok"] and result.get("errno") in _NO_ANSWER for result in results
    )


def text(lines: Sequence[Line]) -> str:
    """What people are told of lines that are deaf."""
    named = [f"{one} and {other}" for one, other in lines[:3]]
    more = [f"{len(lines) - 3} more pairs of hosts"] if len(lines) > 3 else []
    return (f"{', '.join([*named, *more])} do not hear each other: what one sends does not reach "
            "the other (paceline check tries each direction)")  # fmt: skip


class LinkWatch:
    """Asks and tries while the job is silent; never while it goes on.

    Args:
        fleet: The nodes.
        addresses: The hosts' addresses for the job's traffic, as they are at present.
        host_at: The host that has an address; empty when none does.
        silent_s: For how many seconds the job has given no sign.
        told: Called with the lines that are deaf, and how long the job was silent.
    """

    def __init__(self, fleet: Fleet, addresses: Callable[[], Mapping[str, str]],
                 host_at: Callable[[str], str], silent_s: Callable[[], float],
                 on_blocked: Callable[[list[Line], float], None]) -> None:  # fmt: skip
        self._fleet, self._addresses, self._host_at = fleet, addresses, host_at
        self._silent_s, self._told = silent_s, on_blocked
        self._silences = Silences()

    async def run(self) -> None:
        """Until it is cancelled."""
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s, silent_s = LOOK_S, self._silent_s()
            if silent_s < SILENT_S or len(self._nodes) < 2:
                self._silences.forget()
                continue
            await self._look(silent_s)
            if not self._silences:
                pause_s = min(SELDOM_S, max(LOOK_S, silent_s / 10))

    async def _look(self, silent_s: float) -> None:
        due = await self._due()
        if not due:
            return
        called = await self._call(due)
        still = await self._due()
        lines = [pair for pair in due if pair in still and deaf(pair, called)]
        self._silences.forget()
        if lines and self._silent_s() > silent_s:  # else it has gone on meanwhile
            self._told(lines, self._silent_s())

    @property
    def _nodes(self) -> list[Node]:
        return [node for node in self._fleet.nodes if node.running and not node.lost]

    async def _due(self) -> list[Line]:
        """Asks all hosts; the lines that are to be tried."""
        nodes = self._nodes
        answers = await asyncio.gather(*(_ask(node, "unanswered") for node in nodes))
        connections = [
            Unanswered(node.name, peer, int(number), int(times))
            for node, answer in zip(nodes, answers, strict=True)
            for address, number, times in answer.get("connections", ())
            if (peer := self._host_at(str(address))) not in ("", node.name)
        ]
        now = time.monotonic()
        self._silences.heard(connections, now)
        return self._silences.due(now)

    async def _call(self, lines: Sequence[Line]) -> Called:
        """Has the two hosts of each line call each other."""
        addresses, nodes = self._addresses(), {node.name: node for node in self._nodes}
        known = [pair for pair in lines if {*pair} <= {*addresses} & {*nodes}]
        ears = sorted({host for pair in known for host in pair})
        opened = await asyncio.gather(*(
            _ask(nodes[host], "hear", address=addresses[host], seconds=CALL_S + PATIENCE_S)
            for host in ears
        ))  # fmt: skip
        ports = {host: answer["port"] for host, answer in zip(ears, opened, strict=True) if answer}

        async def call(source: str) -> list[Mapping[str, Any]]:
            peers = [host for pair in known if source in pair for host in pair if host != source]
            targets = [
                {"host": host, "address": addresses[host], "port": ports[host],
                 "identity": nodes[host].channel.identity}
                for host in peers if host in ports
            ]  # fmt: skip
            answer = await _ask(nodes[source], "connect", CALL_S + PATIENCE_S, targets=targets,
                                timeout_s=CALL_S, settle_s=CALL_S)  # fmt: skip
            return list(answer.get("results", ()))

        answers = await asyncio.gather(*map(call, ears))
        return {
            (source, str(pair["host"])): pair
            for source, results in zip(ears, answers, strict=True)
            for pair in results
        }


async def _ask(node: Node, op: str, patience_s: float = PATIENCE_S, **fields: Any) -> Any:
    """What an agent answers; nothing where it does not."""
    try:
        return await asyncio.wait_for(node.channel.request(op, **fields), patience_s)
    except (PacelineError, ConnectionError, asyncio.TimeoutError):
        return {}
