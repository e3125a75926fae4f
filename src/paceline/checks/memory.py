"""Is there memory left?

Looks at: what the kernel calls available, before the job has taken any.
Warns when: a host has less than 1 GiB: importing torch in two ranks takes as much, and the kernel
then kills a rank, or somebody else's process.
"""

from __future__ import annotations

from paceline.checks.check import Check, Scene, passed, size, warned
from paceline.spec.finding import Finding

ENOUGH = 1 << 30  # bytes


def judge(scene: Scene) -> list[Finding]:
    found = []
    for name in scene.names:
        memory = scene.facts[name]["memory"]
        if memory and memory["total"] and memory["available"] < ENOUGH:
            left = f"{size(memory['available'])} of {size(memory['total'])}"
            text = f"{name} has {left} of memory left: the kernel may kill a rank"
            remedy = f"See what holds it, on {name}: ps axo rss,pid,user,args | sort -n"
            found.append(warned("memory", [name], text, remedy))
    return found or [passed("memory", scene.names, "memory is left")]


check = Check("memory", "Memory", "facts", judge)
