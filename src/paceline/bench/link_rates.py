"""Finds the host, or the link between two hosts, that slows the collectives down. Pure.

:mod:`.link_rates_job` measures both: the backend's own rate between every two hosts, and the copy
rates of each host. A host is slow if its best link is slow, or if it copies memory at less than
half the others' rate; otherwise a link may be slow.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

Pair: TypeAlias = tuple[Any, Any]  # sender and receiver: names of hosts, or their indices
MAX_REPEATS = 3
SLOW_SHARE = 0.5  # of the median
# payload share of a PCIe lane by GT/s; all later generations transfer 128 of 130 bits
_PCIE_ENCODING = {2.5: 0.8, 5.0: 0.8}


@dataclass(frozen=True, slots=True)
class HostRates:
    """What one host measures by itself.

    Attributes:
        copy: Bytes per second of copies in the device's memory, of the slowest rank.
        bus: The same from the host's memory to the device; 0 without a device.
        slot: The device's PCIe link as the kernel reports it: "16.0 GT/s PCIe x16"; may be empty.
    """

    host: str
    device: str = ""
    copy: float = 0.0
    bus: float = 0.0
    slot: str = ""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What the job measured.

    Attributes:
        hosts: In node order.
        rates: Bytes per second by sender and receiver, with the measured backend. From a host to
            itself: between two of its ranks.
    """

    hosts: tuple[HostRates, ...] = ()
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LinkRates:
        hosts = tuple(HostRates(**host) for host in record["places"])
        return cls(hosts, {(source, target): rate for source, target, rate in record["rates"]})

    def to_json(self) -> dict[str, Any]:
        """All rates in bytes per second."""
        return {"places": [asdict(host) for host in self.hosts],
                "rates": [[*pair, rate] for pair, rate in self.rates.items()]}  # fmt: skip


def peer(node: int, turn: int, nodes: int) -> int | None:
    """The peer of a node in a turn of a round robin; ``None`` if it has none.

    Every two nodes meet once, and each node is in at most one pair of a turn.
    """
    ring = nodes - 1 + nodes % 2  # with an even number, the last node is outside of the ring
    if node == ring:
        return turn * (ring + 1) // 2 % ring
    partner = (turn - node) % ring
    if partner != node:
        return partner
    return ring if ring < nodes else None


def num_turns(nodes: int) -> int:
    """The number of turns until all nodes have met."""
    return 0 if nodes < 2 else nodes - 1 + nodes % 2


def measure_rates(
    measure: Callable[[Collection[Pair] | None], Mapping[Pair, float]],
) -> dict[Pair, float]:
    """The best rate of each link; ``measure`` measures these links once, or all of them.

    Slow links are measured again, because a host may have been busy.
    """
    rates = dict(measure(None))
    for _ in range(MAX_REPEATS):
        slow = slow_pairs(rates)
        if not slow:
            break
        for pair, rate in measure(slow).items():
            rates[pair] = max(rate, rates.get(pair, 0.0))
    return rates


def slow_pairs(rates: Mapping[Pair, float]) -> list[Pair]:
    """The links between hosts with less than half of the median rate."""
    between_hosts = {pair: rate for pair, rate in rates.items() if pair[0] != pair[1]}
    return _slow_keys(between_hosts, _median(between_hosts))


def _slow_keys(rates: Mapping[Any, float], median: float) -> list[Any]:
    return [key for key, rate in rates.items() if rate < SLOW_SHARE * median]


def _median(rates: Mapping[Any, float]) -> float:
    """The median; the higher one of two rates."""
    return statistics.median_high(rates.values()) if rates else 0.0


def verdict(links: LinkRates, known_slow: Sequence[str] = ()) -> tuple[str, ...]:
    """Describes the slow hosts and links.

    Args:
        links: What was measured.
        known_slow: Hosts whose network is already known to be slow.
    """
    slow_hosts = {name: text for name, text in _slow_hosts(links) if name not in known_slow}
    slow = {*known_slow, *slow_hosts}
    return (*slow_hosts.values(), *_slow_copies(links, slow), *_slow_links(links, slow))


def _slow_hosts(links: LinkRates) -> list[tuple[str, str]]:
    """Hosts whose best link is slow; with two hosts, this cannot be decided."""
    best: dict[str, float] = {}
    for pair, rate in links.rates.items():
        if pair[0] != pair[1]:
            for name in pair:
                best[name] = max(best.get(name, 0.0), rate)
    if len(best) < 3:
        return []
    median = _median(best)
    return [(name, f"{name} is slow: its best link carries {format_rate(best[name])}, the others"
             f" reach {format_rate(median)}") for name in _slow_keys(best, median)]  # fmt: skip


def _slow_copies(links: LinkRates, known_slow: Collection[str]) -> list[str]:
    texts = []
    for activity, attribute in (("copies its memory", "copy"), ("feeds its card", "bus")):
        rates = {host.host: float(getattr(host, attribute)) for host in links.hosts}
        median = _median(rates)
        texts += [
            f"{name} itself is slow: it {activity} at {format_rate(rates[name])}, others at"
            f" {format_rate(median)} (another job there, a throttled CPU or card?)"
            for name in _slow_keys(rates, median)
            if name not in known_slow
        ]
    return texts


def _slow_links(links: LinkRates, known_slow: Collection[str]) -> list[str]:
    median = _median({pair: rate for pair, rate in links.rates.items() if pair[0] != pair[1]})
    return [
        f"the link {source}→{target} is slow: {format_rate(links.rates[source, target])}, the"
        f" median is {format_rate(median)}"
        for source, target in slow_pairs(links.rates)
        if not {source, target} & set(known_slow)
    ]


def format_rate(rate: float) -> str:
    """Formats bytes per second in the unit of the table: ``0.0117 GB/s``."""
    return f"{rate / 1e9:.3g} GB/s"


def slot_rate(slot: str) -> float:
    """Bytes per second of a PCIe link as the kernel reports it; 0 when not known."""
    match = re.match(r"([\d.]+) GT/s.*?x(\d+)$", slot)
    if not match:
        return 0.0
    lane = float(match[1])
    return lane * 1e9 / 8 * _PCIE_ENCODING.get(lane, 128 / 130) * int(match[2])


def nominal_rates(plan: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, float]:
    """By host, the highest nominal rate of its interface and RDMA ports, in bits per second.

    Args:
        plan, facts: The run's ``plan.json`` and ``hosts.json``.
    """
    rates = {}
    for node in plan["nodes"]:
        host = facts.get(node["host"]) or {}
        links = [link for link in host.get("interfaces") or () if link["name"] == node["interface"]]
        ports = [port for port in host.get("rdma") or () if port["active"]]
        speeds = [int(link["speed"]) for link in (*links, *ports) if link["speed"] > 0]
        if speeds:
            rates[str(node["host"])] = max(speeds) * 1e6
    return rates
