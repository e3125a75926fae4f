"""Are processes of earlier jobs of ours still there?

Looks at: processes that carry a job's token, and whether an agent owns them.
Warns when: nobody owns them any more. A running job of yours is mentioned, no more.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, Probing, Scene, listed, passed, warned
from paceline.spec.finding import Finding


async def probe(probing: Probing) -> dict[str, Any]:
    """By host, processes with a token."""
    answers = await probing.each("token_processes")
    return {name: answer["processes"] for name, answer in answers.items()}


def judge(scene: Scene) -> list[Finding]:
    found, busy = [], []
    for name, processes in scene.evidence["leftovers"].items():
        orphans = [process for process in processes if not process["owned"]]
        busy += [name] if len(orphans) < len(processes) else []
        if orphans:
            pids = " ".join(str(process["pid"]) for process in orphans)
            age = max(process["age"] for process in orphans)
            found.append(
                warned(
                    "leftovers",
                    [name],
                    f"{len(orphans)} left-over processes of an earlier job "
                    f"on {name}, the oldest {age:.0f} s old: {orphans[0]['command'][:80]}",
                    f"On {name}: kill -9 {pids}",
                )
            )
    if found:
        return found
    text = f"a job of yours is running on {listed(busy)}" if busy else "none"
    return [passed("leftovers", scene.names, f"left-over processes of ours: {text}")]


check = Check("leftovers", "Left-overs", "full", judge, probe)
