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
from paceline.checks.check import Check, Probing, Scene, every, listed, passed, warned
from paceline.spec.errors import PacelineError
from paceline.spec.figures import bit_rate
from paceline.spec.finding import Finding

SECONDS = 0.2
TIMEOUT_S = 15.0
SLOW_SHARE = 0.5
SLOW_BITS = 50e6
LOST_SHARE = 0.005
FEWEST = 4  # segments sent again, before it means anything
MOST_ROUNDS = 15


async def probe(probing: Probing) -> dict[str, Any]:
    """One result a directed pair: source, target, bytes, seconds, retransmitted, carried.

    A way on which segments were sent again is tried once more at half its pace: a full queue in
    front of a slow link then loses nothing, a bad cable still does (``paced``).
    """
    if len(probing.networks) < 2 or _blocked(probing.scene):
        return {"pairs": []}
    lines = await _Lines.open(probing)
    found = []
    for pairs in rounds(list(probing.networks))[:MOST_ROUNDS]:
        found += await every([lines.measure(one, other) for one, other in pairs])
        found += await every([lines.measure(other, one) for one, other in pairs])
    for name in suspects(probing.scene, _good(found)):
        others = [other for other in probing.networks if other != name][:2]
        for other in others:  # alone: other pairs, or a busy moment, may have slowed it
            found += [await lines.measure(name, other), await lines.measure(other, name)]
    for pair in found:
        if "error" not in pair and _resends(pair):
            pace = int(bits(pair) / 16)
            pair["paced"] = await lines.send(pair["source"], pair["target"], pace, 2 * SECONDS)
    return {"pairs": found}


def _blocked(scene: Scene) -> bool:
    """Where ports are closed, that is the finding; a transfer would only wait."""
    found = scene.evidence.get("ports", {})
    known = attribution.faults(found["results"], found["addresses"], found["half_open"])
    return any(len(fault.ports) != 1 for fault in known)


class _Lines:
    """The sinks of all hosts, and sending to them."""

    def __init__(self, probing: Probing, ports: Mapping[str, int]) -> None:
        self._probing = probing
        self._ports = ports

    @classmethod
    async def open(cls, probing: Probing) -> _Lines:
        names = list(probing.networks)
        answers = await every(
            [probing.ask(name, "sink", address=probing.networks[name].address) for name in names]
        )
        return cls(probing, {n: a["port"] for n, a in zip(names, answers, strict=True)})

    async def send(self, source: str, target: str, pace: int, seconds: float) -> dict[str, Any]:
        try:
            return await self._probing.ask(
                source,
                "transfer",
                address=self._probing.networks[target].address,
                port=self._ports[target],
                seconds=seconds,
                pace=pace,
                timeout_s=TIMEOUT_S,
            )
        except (PacelineError, asyncio.TimeoutError) as error:
            return {"error": str(getattr(error, "found", "")) or "no answer"}

    async def measure(self, source: str, target: str) -> dict[str, Any]:
        """As fast as it goes, with the bytes that each interface of the source carried."""
        before = await self._probing.ask(source, "counters")
        sent = await self.send(source, target, 0, SECONDS)
        after = (await self._probing.ask(source, "counters"))["bytes"]
        carried = {n: after[n][1] - c[1] for n, c in before["bytes"].items() if n in after}
        return {"source": source, "target": target, "carried": carried, **sent}


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """A round robin: every two meet once, nobody is in two pairs of a round."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        round_of = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(a, b) for a, b in round_of if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def judge(scene: Scene) -> list[Finding]:
    pairs = scene.evidence["link"]["pairs"]
    if not pairs:
        return []
    good = _good(pairs)
    found = [*_broken(scene, pairs), *_lossy(scene, good)]
    found += [] if found else _slow(scene, good)
    return found or [_speed(scene, good)]


def _share(sent: Mapping[str, Any]) -> float:
    return float(sent.get("retransmitted", 0) / max(1, sent.get("segments", 0)))


def _resends(sent: Mapping[str, Any]) -> bool:
    return int(sent.get("retransmitted", 0)) >= FEWEST and _share(sent) > LOST_SHARE


def bits(pair: Mapping[str, Any]) -> float:
    """Bits a second that arrived."""
    return float(pair["bytes"] * 8 / pair["seconds"])


def _broken(scene: Scene, pairs: Sequence[Mapping[str, Any]]) -> list[Finding]:
    broken = [pair for pair in pairs if "error" in pair]
    if not broken:
        return []
    host = _common([(pair["source"], pair["target"]) for pair in broken], scene.names)
    ways = listed([f"{pair['source']}→{pair['target']}" for pair in broken])
    return [
        warned(
            "link",
            host,
            f"connections open but data does not get through: {ways} "
            f"({broken[0]['error']}); often an MTU too large for the way",
            f"Compare on {listed(list(host))}: ip link; ping -M do -s 1472 PEER; lower "
            "it: sudo ip link set NAME mtu 1400",
        )
    ]


def _lossy(scene: Scene, pairs: Sequence[Mapping[str, Any]]) -> list[Finding]:
    lossy = [pair for pair in pairs if _resends(pair.get("paced", {}))]
    if len(lossy) < 2:
        return []
    host = _common([(pair["source"], pair["target"]) for pair in lossy], scene.names)
    worst = max(lossy, key=lambda pair: _share(pair["paced"]))
    share = 100 * _share(worst["paced"])
    interfaces = [f"{name} {scene.networks[name].interface}" for name in host]
    where = ", ".join(interfaces) if len(host) > 1 else scene.networks[host[0]].interface
    of = f"the link of {host[0]}" if len(host) == 1 else f"the way between {listed(list(host))}"
    return [
        warned(
            "link",
            host,
            f"{of} ({where}) loses packets: up to {share:.1f} % of TCP "
            f"segments are sent again ({worst['source']}→{worst['target']}, "
            f"{bit_rate(bits(worst))})",
            f"Look at cable, switch port and driver of {listed(list(host))}: "
            "ethtool -S NAME | grep -iE 'err|drop'; duplex with ethtool NAME",
        )
    ]


def _good(pairs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [pair for pair in pairs if "error" not in pair and pair["seconds"] > 0]


def best_rates(scene: Scene, pairs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By host, the best rate over all its ways, both directions: no more than its link's speed.

    What goes beyond the link's own speed (in memory, between virtual hosts) says nothing of it.
    """
    found: dict[str, float] = {}
    for pair in pairs:
        for name in (pair["source"], pair["target"]):
            found[name] = max(found.get(name, 0.0), min(bits(pair), _speed_of(scene, name)))
    return found


def _speed_of(scene: Scene, name: str) -> float:
    """Bits a second that the interface says it can do; infinite when it does not say."""
    links = scene.facts[name]["interfaces"] or []
    used = scene.networks[name].interface if name in scene.networks else ""
    speeds = [link["speed"] for link in links if link["name"] == used and link["speed"] > 0]
    return speeds[0] * 1e6 if speeds else float("inf")


def suspects(scene: Scene, pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hosts whose best rate is under half of what the others reach; none among two hosts."""
    best = best_rates(scene, pairs)
    if len(best) < 3:
        return []
    usual = sorted(best.values())[len(best) // 2]
    slow = [name for name, own in best.items() if own < SLOW_SHARE * usual]
    return sorted(slow, key=best.__getitem__)


def _slow(scene: Scene, pairs: Sequence[Mapping[str, Any]]) -> list[Finding]:
    if not pairs:
        return []
    if slow := suspects(scene, pairs):
        best = best_rates(scene, pairs)
        usual = sorted(best.values())[len(best) // 2]
        return [_slow_host(scene, name, best[name], usual) for name in slow]
    slowest = min(pairs, key=bits)
    if bits(slowest) < SLOW_BITS:
        names = (slowest["source"], slowest["target"])
        return [
            warned(
                "link",
                names,
                f"the way {names[0]}→{names[1]} carries only "
                f"{bit_rate(bits(slowest))}: exchanging 100 MB of gradients takes "
                f"{1.6e9 / bits(slowest):.0f} s a step",
                "Use a wired network (--iface NAME), larger batches with accumulation, or one host",
            )
        ]
    return []


def _slow_host(scene: Scene, name: str, own: float, usual: float) -> Finding:
    interface = scene.networks[name].interface
    return warned(
        "link",
        [name],
        f"the link of {name} ({interface}) is slow: {bit_rate(own)}, the others reach "
        f"{bit_rate(usual)}; the whole job goes at its pace",
        f"On {name}: ethtool {interface} (speed, duplex), try another cable or port; or leave "
        f"{name} out with --nnodes or the host list",
    )


def _common(pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> tuple[str, ...]:
    """The host that all these pairs share, if three or more are there; else those concerned."""
    concerned = [name for name in names if any(name in pair for pair in pairs)]
    shared = [name for name in concerned if all(name in pair for pair in pairs)]
    if len(names) > 2 and len(shared) == 1 and len(pairs) > 2:
        return (shared[0],)
    most = [n for n in concerned if sum(n in pair for pair in pairs) >= 0.75 * len(pairs)]
    return (most[0],) if len(names) > 2 and len(most) == 1 else tuple(concerned)


def _speed(scene: Scene, pairs: Sequence[Mapping[str, Any]]) -> Finding:
    slowest = min(pairs, key=bits)
    return passed(
        "link",
        scene.names,
        f"slowest of {len(pairs)} ways: {bit_rate(bits(slowest))} "
        f"({slowest['source']}→{slowest['target']})",
    )


check = Check("link", "Bandwidth", "full", judge, probe, several=True)
