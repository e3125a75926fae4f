"""Does the traffic really leave through the interface that was chosen?

Looks at: bytes counted on every interface while a known amount was sent.
Warns when: most of it left elsewhere: two interfaces in one subnet, where the kernel goes by
metric and not by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, Survey, format_bytes, join_names, passed, warned
from paceline.spec.finding import Finding

MIN_SENT_BYTES = 1 << 20  # bytes; below that, other traffic may mislead


def evaluate(survey: Survey) -> list[Finding]:
    pairs = (survey.evidence.get("link") or {}).get("pairs", [])
    misrouted: dict[str, list[Mapping[str, Any]]] = {}
    for pair in pairs:
        if _is_misrouted(survey, pair):
            misrouted.setdefault(pair["source"], []).append(pair)
    findings = [_finding(survey, name, host_pairs) for name, host_pairs in misrouted.items()]
    if findings or not survey.networks:
        return findings
    interfaces = ", ".join(f"{n} {survey.networks[n].interface}" for n in survey.names)
    if not pairs:
        return [passed("interface", survey.names, f"chosen by tried connections: {interfaces}")]
    return [passed("interface", survey.names, f"bytes counted where they should be: {interfaces}")]


def _is_misrouted(survey: Survey, pair: Mapping[str, Any]) -> bool:
    if pair.get("bytes", 0) < MIN_SENT_BYTES or pair["source"] not in survey.networks:
        return False
    interface = survey.networks[pair["source"]].interface
    carried = pair["carried"]
    busiest = max(carried, key=carried.__getitem__, default=interface)
    return busiest != interface and carried.get(interface, 0) < pair["bytes"] // 2


def _finding(survey: Survey, name: str, pairs: list[Mapping[str, Any]]) -> Finding:
    pair, interface = pairs[0], survey.networks[name].interface
    busiest = max(pair["carried"], key=pair["carried"].__getitem__)
    targets = [name for name in survey.names if name in {pair["target"] for pair in pairs}]
    route = f"dev {interface} src {survey.address(name)}"
    routes = [f"sudo ip route replace {survey.address(target)} {route}" for target in targets]
    return warned(
        "interface",
        [name],
        f"{name} sends to {join_names(targets)} through {busiest}, not through {interface}: of "
        f"{format_bytes(pair['bytes'])} sent, {busiest} carried {format_bytes(pair['carried'][busiest])} "
        "(two interfaces in one subnet: the kernel goes by metric)",
        f"On {name}: {' && '.join(routes)}\n(or take {busiest}: --iface {busiest})",
    )


check = Check("interface", "Interface", "full", evaluate, needs_several_hosts=True)
