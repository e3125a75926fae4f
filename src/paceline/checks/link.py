"""How fast is the way between the nodes, and does it lose packets?

Looks at: a quarter of a second of TCP between every two neighbours of a round robin, one pair a
host at a time, both ways; every pair up to 16 hosts. Retransmissions are the kernel's count.
Warns when: one host's best rate is under half of what the others reach, more than one segment in
two hundred is sent again, or a way carries less than 50 Mbit/s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checks import attribution
from paceline.checks.check import (
    Check,
    ProbeSession,
    Survey,
    gather_all,
    join_names,
    passed,
    warned,
)
from paceline.spec.errors import PacelineError
from paceline.spec.figures import bit_rate
from paceline.spec.finding import Finding

TRANSFER_S = 0.2
TIMEOUT_S = 15.0
SLOW_SHARE = 0.5
SLOW_BITS_PER_S = 50e6
MAX_RETRANSMITTED_SHARE = 0.005
MIN_RETRANSMITTED = 4  # segments sent again, before it means anything
MAX_ROUNDS = 15


async def probe(session: ProbeSession) -> dict[str, Any]:
    """One result a directed pair: source, target, bytes, seconds, retransmitted, carried.

    A way on which segments were sent again is tried once more at half its pace: a full queue in
    front of a slow link then loses nothing, a bad cable still does (``paced``).
    """
    if len(session.networks) < 2 or _blocked(session.survey):
        return {"pairs": []}
    sinks = await _Sinks.open(session)
    measurements = []
    for pairs in rounds(list(session.networks))[:MAX_ROUNDS]:
        measurements += await gather_all([sinks.measure(first, second) for first, second in pairs])
        measurements += await gather_all([sinks.measure(second, first) for first, second in pairs])
    for name in slow_hosts(session.survey, _completed(measurements)):
        partners = [second for second in session.networks if second != name][:2]
        for second in partners:  # alone: other pairs, or a busy moment, may have slowed it
            measurements += [await sinks.measure(name, second), await sinks.measure(second, name)]
    for pair in measurements:
        if "error" not in pair and _retransmits(pair):
            rate = int(bits_per_s(pair) / 16)
            pair["paced"] = await sinks.send(pair["source"], pair["target"], rate, 2 * TRANSFER_S)
    return {"pairs": measurements}


def _blocked(survey: Survey) -> bool:
    """Where ports are closed, that is the finding; a transfer would only wait."""
    evidence = survey.evidence.get("ports", {})
    faults = attribution.faults(evidence["results"], evidence["addresses"], evidence["half_open"])
    return any(len(fault.ports) != 1 for fault in faults)


class _Sinks:
    """The sinks of all hosts, and sending to them."""

    def __init__(self, session: ProbeSession, ports: Mapping[str, int]) -> None:
        self._session = session
        self._ports = ports

    @classmethod
    async def open(cls, session: ProbeSession) -> _Sinks:
        names = list(session.networks)
        answers = await gather_all(
            [
                session.request(name, "sink", address=session.networks[name].address)
                for name in names
            ]
        )
        return cls(session, {n: a["port"] for n, a in zip(names, answers, strict=True)})

    async def send(self, source: str, target: str, rate: int, seconds: float) -> dict[str, Any]:
        try:
            return await self._session.request(
                source,
                "transfer",
                address=self._session.networks[target].address,
                port=self._ports[target],
                seconds=seconds,
                pace=rate,
                timeout_s=TIMEOUT_S,
            )
        except (PacelineError, asyncio.TimeoutError) as error:
            return {"error": str(getattr(error, "found", "")) or "no answer"}

    async def measure(self, source: str, target: str) -> dict[str, Any]:
        """As fast as it goes, with the bytes that each interface of the source carried."""
        counters_at_start = await self._session.request(source, "counters")
        sent = await self.send(source, target, 0, TRANSFER_S)
        counters_at_end = (await self._session.request(source, "counters"))["bytes"]
        carried = {
            n: counters_at_end[n][1] - c[1]
            for n, c in counters_at_start["bytes"].items()
            if n in counters_at_end
        }
        return {"source": source, "target": target, "carried": carried, **sent}


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """A round robin: every two meet once, nobody is in two pairs of a round."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    schedule = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        round_of = zip(ring[:half], reversed(ring[half:]), strict=True)
        schedule.append([(a, b) for a, b in round_of if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return schedule


def evaluate(survey: Survey) -> list[Finding]:
    pairs = survey.evidence["link"]["pairs"]
    if not pairs:
        return []
    measured = _completed(pairs)
    findings = [*_broken_findings(survey, pairs), *_lossy_findings(survey, measured)]
    findings += [] if findings else _slow_findings(survey, measured)
    return findings or [_speed_finding(survey, measured)]


def _retransmitted_share(sent: Mapping[str, Any]) -> float:
    return float(sent.get("retransmitted", 0) / max(1, sent.get("segments", 0)))


def _retransmits(sent: Mapping[str, Any]) -> bool:
    return (
        int(sent.get("retransmitted", 0)) >= MIN_RETRANSMITTED
        and _retransmitted_share(sent) > MAX_RETRANSMITTED_SHARE
    )


def bits_per_s(pair: Mapping[str, Any]) -> float:
    """Bits a second that arrived."""
    return float(pair["bytes"] * 8 / pair["seconds"])


def _broken_findings(survey: Survey, pairs: Sequence[Mapping[str, Any]]) -> list[Finding]:
    broken = [pair for pair in pairs if "error" in pair]
    if not broken:
        return []
    host = _shared_hosts([(pair["source"], pair["target"]) for pair in broken], survey.names)
    directions = join_names([f"{pair['source']}→{pair['target']}" for pair in broken])
    return [
        warned(
            "link",
            host,
            f"connections open but data does not get through: {directions} "
            f"({broken[0]['error']}); often an MTU too large for the way",
            f"Compare on {join_names(list(host))}: ip link; ping -M do -s 1472 PEER; lower "
            "it: sudo ip link set NAME mtu 1400",
        )
    ]


def _lossy_findings(survey: Survey, pairs: Sequence[Mapping[str, Any]]) -> list[Finding]:
    lossy = [pair for pair in pairs if _retransmits(pair.get("paced", {}))]
    if len(lossy) < 2:
        return []
    host = _shared_hosts([(pair["source"], pair["target"]) for pair in lossy], survey.names)
    lossiest = max(lossy, key=lambda pair: _retransmitted_share(pair["paced"]))
    share = 100 * _retransmitted_share(lossiest["paced"])
    interfaces = [f"{name} {survey.networks[name].interface}" for name in host]
    interface_text = ", ".join(interfaces) if len(host) > 1 else survey.networks[host[0]].interface
    subject = (
        f"the link of {host[0]}" if len(host) == 1 else f"the way between {join_names(list(host))}"
    )
    return [
        warned(
            "link",
            host,
            f"{subject} ({interface_text}) loses packets: up to {share:.1f} % of TCP "
            f"segments are sent again ({lossiest['source']}→{lossiest['target']}, "
            f"{bit_rate(bits_per_s(lossiest))})",
            f"Look at cable, switch port and driver of {join_names(list(host))}: "
            "ethtool -S NAME | grep -iE 'err|drop'; duplex with ethtool NAME",
        )
    ]


def _completed(pairs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [pair for pair in pairs if "error" not in pair and pair["seconds"] > 0]


def peak_rates(survey: Survey, pairs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By host, the best rate over all its ways, both directions: no more than its link's speed.

    What goes beyond the link's own speed (in memory, between virtual hosts) says nothing of it.
    """
    rates: dict[str, float] = {}
    for pair in pairs:
        for name in (pair["source"], pair["target"]):
            rates[name] = max(
                rates.get(name, 0.0), min(bits_per_s(pair), _interface_bits_per_s(survey, name))
            )
    return rates


def _interface_bits_per_s(survey: Survey, name: str) -> float:
    """Bits a second that the interface says it can do; infinite when it does not say."""
    links = survey.facts[name]["interfaces"] or []
    used = survey.networks[name].interface if name in survey.networks else ""
    speeds = [link["speed"] for link in links if link["name"] == used and link["speed"] > 0]
    return speeds[0] * 1e6 if speeds else float("inf")


def slow_hosts(survey: Survey, pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hosts whose best rate is under half of what the others reach; none among two hosts."""
    rates = peak_rates(survey, pairs)
    if len(rates) < 3:
        return []
    median = sorted(rates.values())[len(rates) // 2]
    hosts = [name for name, rate in rates.items() if rate < SLOW_SHARE * median]
    return sorted(hosts, key=rates.__getitem__)


def _slow_findings(survey: Survey, pairs: Sequence[Mapping[str, Any]]) -> list[Finding]:
    if not pairs:
        return []
    if hosts := slow_hosts(survey, pairs):
        rates = peak_rates(survey, pairs)
        median = sorted(rates.values())[len(rates) // 2]
        return [_slow_host_finding(survey, name, rates[name], median) for name in hosts]
    slowest = min(pairs, key=bits_per_s)
    if bits_per_s(slowest) < SLOW_BITS_PER_S:
        names = (slowest["source"], slowest["target"])
        return [
            warned(
                "link",
                names,
                f"the way {names[0]}→{names[1]} carries only "
                f"{bit_rate(bits_per_s(slowest))}: exchanging 100 MB of gradients takes "
                f"{1.6e9 / bits_per_s(slowest):.0f} s a step",
                "Use a wired network (--iface NAME), larger batches with accumulation, or one host",
            )
        ]
    return []


def _slow_host_finding(survey: Survey, name: str, rate: float, median: float) -> Finding:
    interface = survey.networks[name].interface
    return warned(
        "link",
        [name],
        f"the link of {name} ({interface}) is slow: {bit_rate(rate)}, the others reach "
        f"{bit_rate(median)}; the whole job goes at its pace",
        f"On {name}: ethtool {interface} (speed, duplex), try another cable or port; or leave "
        f"{name} out with --nnodes or the host list",
    )


def _shared_hosts(pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[str, ...]:
    """The host that all these pairs share, if three or more are there; else those concerned."""
    concerned = [name for name in names if any(name in pair for pair in pairs)]
    shared = [name for name in concerned if all(name in pair for pair in pairs)]
    if len(names) > 2 and len(shared) == 1 and len(pairs) > 2:
        return (shared[0],)
    frequent = [n for n in concerned if sum(n in pair for pair in pairs) >= 0.75 * len(pairs)]
    return (frequent[0],) if len(names) > 2 and len(frequent) == 1 else tuple(concerned)


def _speed_finding(survey: Survey, pairs: Sequence[Mapping[str, Any]]) -> Finding:
    slowest = min(pairs, key=bits_per_s)
    return passed(
        "link",
        survey.names,
        f"slowest of {len(pairs)} ways: {bit_rate(bits_per_s(slowest))} "
        f"({slowest['source']}→{slowest['target']})",
    )


check = Check("link", "Bandwidth", "full", evaluate, probe, needs_several_hosts=True)
