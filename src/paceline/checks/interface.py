"""Does the traffic leave through the chosen interface?

Looks at: bytes counted on every interface while a known amount was sent.
Warns when: most of it left through another one: of two interfaces in one subnet the kernel takes
the one with the lower metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, Survey, format_bytes, join_names, passed, warned
from paceline.spec.finding import Finding

MIN_SENT_BYTES = 1 << 20  # below, other traffic may mislead


def evaluate(survey: Survey) -> list[Finding]:
    pairs = (survey.evidence.get("link") or {}).get("pairs", [])
    misrouted: dict[str, list[Mapping[str, Any]]] = {}
    for pair in pairs:
        if _is_misrouted(survey, pair):
            misrouted.setdefault(pair["source"], []).append(pair)
    findings = [_finding(survey, name, host_pairs) for name, host_pairs in misrouted.items()]
    if findings or not survey.networks:
        return findings
    reason = "bytes counted where they should be" if pairs else "chosen by tried connections"
    interfaces = ", ".join(f"{name} {survey.networks[name].interface}" for name in survey.names)
    return [passed("interface", survey.names, f"{reason}: {interfaces}")]


def _is_misrouted(survey: Survey, pair: Mapping[str, Any]) -> bool:
    if pair.get("bytes", 0) < MIN_SENT_BYTES or pair["source"] not in survey.networks:
        return False
    chosen, carried = survey.networks[pair["source"]].interface, pair["carried"]
    busiest = max(carried, key=carried.__getitem__, default=chosen)
    return busiest != chosen and carried.get(chosen, 0) < pair["bytes"] // 2


def _finding(survey: Survey, name: str, pairs: list[Mapping[str, Any]]) -> Finding:
    sent, carried = pairs[0]["bytes"], pairs[0]["carried"]
    chosen = survey.networks[name].interface
    busiest = max(carried, key=carried.__getitem__)
    targets = [name for name in survey.names if name in {pair["target"] for pair in pairs}]
    message = (
        f"{name} sends to {join_names(targets)} through {busiest}, not through {chosen}: of "
        f"{format_bytes(sent)} sent, {busiest} carried {format_bytes(carried[busiest])} "
        "(two interfaces in one subnet: the kernel goes by metric)"
    )
    route = f"dev {chosen} src {survey.address(name)}"
    commands = [f"sudo ip route replace {survey.address(target)} {route}" for target in targets]
    remedy = f"On {name}: {' && '.join(commands)}\n(or take {busiest}: --iface {busiest})"
    return warned("interface", [name], message, remedy)


check = Check("interface", "Interface", evaluate, needs_several_hosts=True)
