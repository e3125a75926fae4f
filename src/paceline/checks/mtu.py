"""Is the largest packet the same on all chosen interfaces?

Warns when: the MTUs differ. Then small messages pass, and large ones hang or are slow.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, passed, warned
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    sizes = {name: _mtu(survey, name) for name in survey.names if name in survey.networks}
    if len(set(sizes.values())) > 1:
        summary = ", ".join(f"{n} {survey.networks[n].interface} {mtu}" for n, mtu in sizes.items())
        low = min(sizes.values())
        high = [name for name, mtu in sizes.items() if mtu > low]
        commands = "\n".join(
            f"On {n}: sudo ip link set {survey.networks[n].interface} mtu {low}" for n in high
        )
        return [warned("mtu", tuple(sizes), f"the MTU differs: {summary}", commands)]
    return [passed("mtu", tuple(sizes), f"MTU {n}") for n in set(sizes.values())]


def _mtu(survey: Survey, name: str) -> int:
    used = survey.networks[name].interface
    links = survey.interfaces(name)
    return next((int(link["mtu"]) for link in links if link["name"] == used), 0)


check = Check("mtu", "MTU", evaluate, needs_several_hosts=True)
