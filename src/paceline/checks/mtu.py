"""Is the largest packet the same on all chosen interfaces?

Warns when: the MTUs differ. Small messages then pass and large ones hang or crawl.
"""

from __future__ import annotations

from paceline.checks.check import Check, Scene, passed, warned
from paceline.spec.finding import Finding


def judge(scene: Scene) -> list[Finding]:
    sizes = {name: _mtu(scene, name) for name in scene.names if name in scene.networks}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{n} {scene.networks[n].interface} {mtu}" for n, mtu in sizes.items())
        low = min(sizes.values())
        high = [name for name, mtu in sizes.items() if mtu > low]
        commands = "\n".join(
            f"On {n}: sudo ip link set {scene.networks[n].interface} mtu {low}" for n in high
        )
        return [warned("mtu", tuple(sizes), f"the MTU differs: {told}", commands)]
    return [passed("mtu", tuple(sizes), f"MTU {n}") for n in set(sizes.values())]


def _mtu(scene: Scene, name: str) -> int:
    chosen = scene.networks[name].interface
    links = scene.facts[name]["interfaces"] or []
    return next((int(link["mtu"]) for link in links if link["name"] == chosen), 0)


check = Check("mtu", "MTU", "quick", judge, several=True)
