"""How fast are the links between the nodes, and do they lose packets?

Looks at: a fifth of a second of TCP between every two neighbours of a round robin, one pair a
host at a time, both ways; every pair up to 16 hosts. Retransmissions are the kernel's count.
Warns when: one host's best rate is under half of what the others reach, more than one segment in
two hundred is retransmitted, or a link carries less than 50 Mbit/s.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checks import attribution
from paceline.checks.check import (
    Check,
    ProbeSession,
    Survey,
    join_names,
    passed,
    unknown,
    warned,
)
from paceline.remote.fanout import gather_all
from paceline.spec.errors import PacelineError
from paceline.spec.finding import Finding
from paceline.spec.formatting import format_bit_rate

TRANSFER_S = 0.2
TIMEOUT_S = 15.0
SLOW_SHARE = 0.5
SLOW_BITS_PER_S = 50e6
MAX_RETRANSMITTED_SHARE = 0.005
MIN_RETRANSMITTED = 4  # segments; fewer are no sign of loss
MAX_ROUNDS = 15

Transfer = Mapping[str, Any]
"""A directed pair: ``source``, ``target``, ``bytes``, ``seconds``, ``retransmitted``, …"""


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns one transfer for each directed pair.

    A transfer with retransmissions is repeated at a sixteenth of its rate (``paced``): a full queue
    in front of a slow link then loses nothing, a bad cable still does.
    """
    if len(session.networks) < 2 or _is_blocked(session.survey):
        return {"pairs": []}
    names = list(session.networks)
    sinks = await _Sinks.open(session)
    transfers = []
    for pairs in rounds(names)[:MAX_ROUNDS]:
        transfers += await gather_all([sinks.measure(a, b) for a, b in pairs])
        transfers += await gather_all([sinks.measure(b, a) for a, b in pairs])
    for name in slow_hosts(session.survey, _completed(transfers)):
        # measured again alone: other pairs, or a busy moment, may have slowed it
        for partner in [other for other in names if other != name][:2]:
            transfers += [await sinks.measure(name, partner), await sinks.measure(partner, name)]
    for transfer in transfers:
        if "error" not in transfer and _retransmits(transfer):
            rate = int(bits_per_s(transfer) / 16)
            source, target = transfer["source"], transfer["target"]
            transfer["paced"] = await sinks.send(source, target, rate, 2 * TRANSFER_S)
    return {"pairs": transfers}


def _is_blocked(survey: Survey) -> bool:
    """Whether ports are closed, which is a finding of its own; a transfer would only wait."""
    evidence = survey.evidence.get("ports", {})
    faults = attribution.faults(evidence["results"], evidence["addresses"], evidence["half_open"])
    return any(len(fault.ports) != 1 for fault in faults)


class _Sinks:
    """Receivers on all hosts, and sending to them."""

    def __init__(self, session: ProbeSession, ports: Mapping[str, int], key: str) -> None:
        self._session = session
        self._ports = ports
        self._key = key  # without it a sink takes nothing

    @classmethod
    async def open(cls, session: ProbeSession) -> _Sinks:
        networks, key = session.networks, secrets.token_hex(32)
        answers = await gather_all([
            session.request(name, "sink", address=networks[name].address, key=key)
            for name in networks
        ])  # fmt: skip
        return cls(session, {n: a["port"] for n, a in zip(networks, answers, strict=True)}, key)

    async def send(self, source: str, target: str, rate: int, seconds: float) -> dict[str, Any]:
        address = self._session.networks[target].address
        try:
            return await self._session.request(
                source, "transfer", address=address, port=self._ports[target], key=self._key,
                seconds=seconds, pace=rate, timeout_s=TIMEOUT_S,
            )  # fmt: skip
        except (PacelineError, asyncio.TimeoutError) as error:
            return {"error": str(getattr(error, "found", "")) or "no answer"}

    async def measure(self, source: str, target: str) -> dict[str, Any]:
        """Sends at full rate; returns also the bytes that each interface of the source carried."""
        start = (await self._session.request(source, "counters"))["bytes"]
        sent = await self.send(source, target, 0, TRANSFER_S)
        end = (await self._session.request(source, "counters"))["bytes"]
        carried = {name: end[name][1] - start[name][1] for name in start if name in end}
        return {"source": source, "target": target, "carried": carried, **sent}


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Returns a round robin: every two names meet once, no name is in two pairs of a round."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    schedule = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        schedule.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return schedule


def evaluate(survey: Survey) -> list[Finding]:
    transfers = survey.evidence["link"]["pairs"]
    if not transfers:
        return []
    completed = _completed(transfers)
    findings = [*_broken_findings(survey, transfers), *_lossy_findings(survey, completed)]
    findings = findings or _slow_findings(survey, completed)
    if findings:
        return findings
    if not completed:
        message = f"no host sent anything within {TRANSFER_S:g} s: they are too busy to be measured"
        return [unknown("link", survey.names, message, "Run the check again when they are idle")]
    slowest = min(completed, key=bits_per_s)
    rate = format_bit_rate(bits_per_s(slowest))
    message = f"slowest of {len(completed)} ways: {rate} ({_direction(slowest)})"
    return [passed("link", survey.names, message)]


def _direction(transfer: Transfer) -> str:
    return f"{transfer['source']}→{transfer['target']}"


def _retransmitted_share(sent: Transfer) -> float:
    return float(sent.get("retransmitted", 0) / max(1, sent.get("segments", 0)))


def _retransmits(sent: Transfer) -> bool:
    enough = int(sent.get("retransmitted", 0)) >= MIN_RETRANSMITTED
    return enough and _retransmitted_share(sent) > MAX_RETRANSMITTED_SHARE


def bits_per_s(transfer: Transfer) -> float:
    return float(transfer["bytes"] * 8 / transfer["seconds"])


def _broken_findings(survey: Survey, transfers: Sequence[Transfer]) -> list[Finding]:
    broken = [transfer for transfer in transfers if "error" in transfer]
    if not broken:
        return []
    hosts = _hosts_at_fault(broken, survey.names)
    directions = join_names([_direction(transfer) for transfer in broken])
    message = (
        f"connections open but data does not get through: {directions} "
        f"({broken[0]['error']}); often an MTU too large for the way"
    )
    remedy = (
        f"Compare on {join_names(hosts)}: ip link; ping -M do -s 1472 PEER; lower "
        "it: sudo ip link set NAME mtu 1400"
    )
    return [warned("link", hosts, message, remedy)]


def _lossy_findings(survey: Survey, transfers: Sequence[Transfer]) -> list[Finding]:
    lossy = [transfer for transfer in transfers if _retransmits(transfer.get("paced", {}))]
    if len(lossy) < 2:
        return []
    hosts = _hosts_at_fault(lossy, survey.names)
    names = join_names(hosts)
    if len(hosts) == 1:
        subject = f"the link of {names} ({survey.networks[hosts[0]].interface})"
    else:
        interfaces = ", ".join(f"{name} {survey.networks[name].interface}" for name in hosts)
        subject = f"the way between {names} ({interfaces})"
    worst = max(lossy, key=lambda transfer: _retransmitted_share(transfer["paced"]))
    message = (
        f"{subject} loses packets: up to {100 * _retransmitted_share(worst['paced']):.1f} % of TCP "
        f"segments are sent again ({_direction(worst)}, {format_bit_rate(bits_per_s(worst))})"
    )
    remedy = (
        f"Look at cable, switch port and driver of {names}: "
        "ethtool -S NAME | grep -iE 'err|drop'; duplex with ethtool NAME"
    )
    return [warned("link", hosts, message, remedy)]


def _completed(transfers: Sequence[Transfer]) -> list[Transfer]:
    """Returns the transfers that show a speed: a host that is very busy may send nothing."""
    return [t for t in transfers if "error" not in t and t["seconds"] > 0 and t["bytes"] > 0]


def peak_rates(survey: Survey, transfers: Sequence[Transfer]) -> dict[str, float]:
    """Returns the best rate over all links of a host, both directions, by host.

    Capped at the interface's own speed, which transfers between virtual hosts may exceed.
    """
    rates: dict[str, float] = {}
    for transfer in transfers:
        for name in (transfer["source"], transfer["target"]):
            rate = min(bits_per_s(transfer), _interface_bits_per_s(survey, name))
            rates[name] = max(rates.get(name, 0.0), rate)
    return rates


def _interface_bits_per_s(survey: Survey, name: str) -> float:
    """Returns the speed that the interface reports; infinite without a report."""
    used = survey.networks[name].interface if name in survey.networks else ""
    speeds = [link["speed"] for link in survey.interfaces(name) if link["name"] == used]
    return speeds[0] * 1e6 if speeds and speeds[0] > 0 else float("inf")


def slow_hosts(survey: Survey, transfers: Sequence[Transfer]) -> list[str]:
    """Returns hosts whose best rate is under half of the median; none among two hosts."""
    rates = peak_rates(survey, transfers)
    if len(rates) < 3:
        return []
    median = sorted(rates.values())[len(rates) // 2]
    slow = [name for name, rate in rates.items() if rate < SLOW_SHARE * median]
    return sorted(slow, key=rates.__getitem__)


def _slow_findings(survey: Survey, transfers: Sequence[Transfer]) -> list[Finding]:
    if not transfers:
        return []
    rates = peak_rates(survey, transfers)
    median = sorted(rates.values())[len(rates) // 2]
    slow = slow_hosts(survey, transfers)
    if slow:
        return [_slow_host_finding(survey, name, rates[name], median) for name in slow]
    slowest = min(transfers, key=bits_per_s)
    rate = bits_per_s(slowest)
    if rate >= SLOW_BITS_PER_S:
        return []
    message = (
        f"the way {_direction(slowest)} carries only {format_bit_rate(rate)}: exchanging 100 MB of "
        f"gradients takes {1.6e9 / rate:.0f} s a step"
    )
    remedy = "Use a wired network (--iface NAME), larger batches with accumulation, or one host"
    return [warned("link", (slowest["source"], slowest["target"]), message, remedy)]


def _slow_host_finding(survey: Survey, name: str, rate: float, median: float) -> Finding:
    interface = survey.networks[name].interface
    message = (
        f"the link of {name} ({interface}) is slow: {format_bit_rate(rate)}, the others reach "
        f"{format_bit_rate(median)}; the whole job goes at its pace"
    )
    remedy = (
        f"On {name}: ethtool {interface} (speed, duplex), try another cable or port; or leave "
        f"{name} out with --nnodes or the host list"
    )
    return warned("link", [name], message, remedy)


def _hosts_at_fault(transfers: Sequence[Transfer], names: Sequence[str]) -> tuple[str, ...]:
    """Returns the one of three or more hosts that nearly all these transfers share, else all."""
    pairs = [(transfer["source"], transfer["target"]) for transfer in transfers]
    counts = {name: sum(name in pair for pair in pairs) for name in names}
    concerned = [name for name in names if counts[name]]
    shared = [name for name in concerned if counts[name] == len(pairs)]
    if len(names) > 2 and len(shared) == 1 and len(pairs) > 2:
        return (shared[0],)
    frequent = [name for name in concerned if counts[name] >= 0.75 * len(pairs)]
    return (frequent[0],) if len(names) > 2 and len(frequent) == 1 else tuple(concerned)


check = Check("link", "Bandwidth", evaluate, probe, needs_several_hosts=True)
