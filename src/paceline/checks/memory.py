"""Is there memory left?

Looks at: the kernel's available memory, before the job uses any.
Warns when: a host has less than 1 GiB: importing torch in two ranks needs as much, and the kernel
then kills a rank or another process.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, format_bytes, passed, warned
from paceline.spec.finding import Finding

MIN_AVAILABLE_BYTES = 1 << 30  # bytes


def evaluate(survey: Survey) -> list[Finding]:
    findings = []
    for name in survey.names:
        memory = survey.facts[name]["memory"]
        if memory and memory["total"] and memory["available"] < MIN_AVAILABLE_BYTES:
            available = f"{format_bytes(memory['available'])} of {format_bytes(memory['total'])}"
            text = f"{name} has {available} of memory left: the kernel may kill a rank"
            remedy = f"See what holds it, on {name}: ps axo rss,pid,user,args | sort -n"
            findings.append(warned("memory", [name], text, remedy))
    return findings or [passed("memory", survey.names, "memory is left")]


check = Check("memory", "Memory", evaluate)
