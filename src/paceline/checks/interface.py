"""Does the traffic really leave through the interface that was chosen?

Looks at: bytes counted on every interface while a known amount was sent.
Warns when: most of it left elsewhere: two interfaces in one subnet, where the kernel goes by
metric and not by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, Scene, listed, passed, size, warned
from paceline.spec.finding import Finding

ENOUGH = 1 << 20  # bytes; below that, other traffic may mislead


def judge(scene: Scene) -> list[Finding]:
    pairs = (scene.evidence.get("link") or {}).get("pairs", [])
    astray: dict[str, list[Mapping[str, Any]]] = {}
    for pair in pairs:
        if _astray(scene, pair):
            astray.setdefault(pair["source"], []).append(pair)
    found = [_finding(scene, name, own) for name, own in astray.items()]
    if found or not scene.networks:
        return found
    ways = ", ".join(f"{n} {scene.networks[n].interface}" for n in scene.names)
    if not pairs:
        return [passed("interface", scene.names, f"chosen by tried connections: {ways}")]
    return [passed("interface", scene.names, f"bytes counted where they should be: {ways}")]


def _astray(scene: Scene, pair: Mapping[str, Any]) -> bool:
    if pair.get("bytes", 0) < ENOUGH or pair["source"] not in scene.networks:
        return False
    chosen = scene.networks[pair["source"]].interface
    carried = pair["carried"]
    busiest = max(carried, key=carried.__getitem__, default=chosen)
    return busiest != chosen and carried.get(chosen, 0) < pair["bytes"] // 2


def _finding(scene: Scene, name: str, pairs: list[Mapping[str, Any]]) -> Finding:
    pair, chosen = pairs[0], scene.networks[name].interface
    busiest = max(pair["carried"], key=pair["carried"].__getitem__)
    targets = [name for name in scene.names if name in {pair["target"] for pair in pairs}]
    way = f"dev {chosen} src {scene.address(name)}"
    routes = [f"sudo ip route replace {scene.address(target)} {way}" for target in targets]
    return warned(
        "interface",
        [name],
        f"{name} sends to {listed(targets)} through {busiest}, not through {chosen}: of "
        f"{size(pair['bytes'])} sent, {busiest} carried {size(pair['carried'][busiest])} "
        "(two interfaces in one subnet: the kernel goes by metric)",
        f"On {name}: {' && '.join(routes)}\n(or take {busiest}: --iface {busiest})",
    )


check = Check("interface", "Interface", "full", judge, several=True)
