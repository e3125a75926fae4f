"""Which host, or which way between two, holds the collectives up. Pure.

The job measures both itself (:mod:`.ways_job`): the backend's own rate between every two hosts,
and what each host can do alone. A host all of whose ways are slow is slow, and so is one that
copies its own memory at half the others' pace; else a way is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Pair: TypeAlias = tuple[Any, Any]  # from, to: names of hosts, or their numbers
MOST_REPEATS = 3
SLOW_SHARE = 0.5  # of what is usual
ENCODED = {
    2.5: 0.8,
    5.0: 0.8,
}  # GT/s of a PCIe lane → payload share; later kinds lose 2 of 130 bits


@dataclass(frozen=True, slots=True)
class Place:
    """What one host can do alone.

    Attributes:
        host: Its name.
        device: What its ranks compute on, in words.
        copy: Bytes a second of its slowest rank's copies in the device's memory.
        bus: The same from the host's memory to the device; 0 without one.
        slot: The device's PCIe link as the kernel says: "16.0 GT/s PCIe x16"; empty without.
    """

    host: str
    device: str = ""
    copy: float = 0.0
    bus: float = 0.0
    slot: str = ""


@dataclass(frozen=True, slots=True)
class Ways:
    """What the job measured.

    Attributes:
        places: Each host, in node order.
        rates: Bytes a second by (from, to), by the backend that was measured; of a host to itself:
            between two of its ranks.
    """

    places: tuple[Place, ...] = ()
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Ways:
        places = tuple(Place(**one) for one in said["places"])
        return cls(places, {(a, b): rate for a, b, rate in said["rates"]})

    def to_json(self) -> dict[str, Any]:
        """Every rate in bytes a second."""
        places = [{name: getattr(one, name) for name in Place.__slots__} for one in self.places]
        return {"places": places, "rates": [[*pair, rate] for pair, rate in self.rates.items()]}

    @property
    def between(self) -> dict[tuple[str, str], float]:
        """The rates between different hosts."""
        return {pair: rate for pair, rate in self.rates.items() if pair[0] != pair[1]}


def partner(node: int, turn: int, nodes: int) -> int | None:
    """Whom a node meets in a turn of a round robin of ``nodes - 1`` (odd: ``nodes``) turns.

    Every two meet once, nobody is in two pairs of a turn; ``None`` where a node sits out.
    """
    ring = nodes - 1 + nodes % 2  # of an even number the last stands still, and meets who is free
    if node == ring:
        return turn * (ring + 1) // 2 % ring
    other = (turn - node) % ring
    if other != node:
        return other
    return ring if ring < nodes else None


def turns(nodes: int) -> int:
    """How many turns it takes until all have met."""
    return 0 if nodes < 2 else nodes - 1 + nodes % 2


def settled_rates(measure: Callable[[Collection[Pair] | None], Mapping[Pair, float]],
                  most_repeats: int = MOST_REPEATS) -> dict[Pair, float]:  # fmt: skip
    """The best rate of each way; one that looks slow is measured again, for a host may be busy.

    Args:
        measure: Measures these ways once, or all of them.
        most_repeats: How often slow ways are measured again.
    """
    rates = dict(measure(None))
    for _ in range(most_repeats):
        slow = slow_pairs(rates)
        if not slow:
            break
        for pair, rate in measure(slow).items():
            rates[pair] = max(rate, rates.get(pair, 0.0))
    return rates


def slow_pairs(rates: Mapping[Pair, float]) -> list[Pair]:
    """The ways between hosts that carry less than half of what is usual."""
    between = {pair: rate for pair, rate in rates.items() if pair[0] != pair[1]}
    usual = _usual(between)
    return [pair for pair, rate in between.items() if rate < SLOW_SHARE * usual]


def _usual(rates: Mapping[Pair, float]) -> float:
    """The median, of two ways the better one."""
    return sorted(rates.values())[len(rates) // 2] if rates else 0.0


def verdict(ways: Ways, known: Sequence[str] = ()) -> tuple[str, ...]:
    """The slow hosts and ways, in words.

    Args:
        ways: What was measured.
        known: Hosts of which something else has said already that their network is slow.
    """
    hosts = [(name, words) for name, words in _slow_hosts(ways) if name not in known]
    slow = [*known, *(name for name, _ in hosts)]
    return (*(words for _, words in hosts), *_slow_copies(ways, slow), *_slow_ways(ways, slow))


def _slow_hosts(ways: Ways) -> list[tuple[str, str]]:
    """Hosts whose best way is slow: of two hosts nobody can say which it is."""
    best: dict[str, float] = {}
    for pair, rate in ways.between.items():
        for name in pair:
            best[name] = max(best.get(name, 0.0), rate)
    if len(best) < 3:
        return []
    usual = sorted(best.values())[len(best) // 2]
    return [
        (
            name,
            f"{name} is slow: its best way carries {shown(own)}, the others reach {shown(usual)}",
        )
        for name, own in best.items()
        if own < SLOW_SHARE * usual
    ]


def _slow_copies(ways: Ways, known: Sequence[str]) -> list[str]:
    found = []
    for what, attribute in (("copies its memory", "copy"), ("feeds its card", "bus")):
        rates = {one.host: float(getattr(one, attribute)) for one in ways.places}
        usual = sorted(rates.values())[len(rates) // 2] if rates else 0.0
        found += [
            f"{name} itself is slow: it {what} at {shown(own)}, others at {shown(usual)} "
            "(another job there, a throttled CPU or card?)"
            for name, own in rates.items()
            if own < SLOW_SHARE * usual and name not in known
        ]
    return found


def _slow_ways(ways: Ways, known: Sequence[str]) -> list[str]:
    usual = _usual(ways.between)
    return [
        f"the way {source}→{target} is slow: {shown(ways.rates[source, target])}, "
        f"usual is {shown(usual)}"
        for source, target in slow_pairs(ways.rates)
        if not {source, target} & set(known)
    ]


def shown(rate: float) -> str:
    """``0.0117 GB/s``: bytes a second as the table has them."""
    return f"{rate / 1e9:.3g} GB/s"


def slot_rate(slot: str) -> float:
    """Bytes a second that a PCIe link is good for; 0 where its words say nothing.

    Args:
        slot: As the kernel writes it: speed of a lane, and ``xN`` lanes.
    """
    found = re.match(r"([\d.]+) GT/s.*?x(\d+)$", slot)
    if not found:
        return 0.0
    lane = float(found[1])
    return lane * 1e9 / 8 * ENCODED.get(lane, 128 / 130) * int(found[2])


def wires(plan: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, float]:
    """By host, what its wire is good for, in bits a second: interface and active RDMA cards.

    Args:
        plan, facts: The run's ``plan.json`` and ``hosts.json``.
    """
    found = {}
    for node in plan["nodes"]:
        about = facts.get(node["host"]) or {}
        links = [one for one in about.get("interfaces") or () if one["name"] == node["interface"]]
        ports = [port for port in about.get("rdma") or () if port["active"]]
        speeds = [int(one["speed"]) for one in (*links, *ports) if one["speed"] > 0]
        if speeds:
            found[str(node["host"])] = max(speeds) * 1e6
    return found
