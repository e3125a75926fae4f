"""Are processes of earlier jobs of ours still there?

Looks at: processes that carry a job's token, and whether an agent owns them.
Warns when: nobody owns them any more. A running job of yours, and a host that is kept ready for
your next command, are mentioned, no more.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, join_names, passed, warned
from paceline.spec.finding import Finding


async def probe(session: ProbeSession) -> dict[str, Any]:
    """By host, processes with a token."""
    answers = await session.request_all("token_processes")
    return {name: answer["processes"] for name, answer in answers.items()}


def evaluate(survey: Survey) -> list[Finding]:
    findings: list[Finding] = []
    busy: list[str] = []
    ready: list[str] = []
    for name, processes in survey.evidence["leftovers"].items():
        orphans = [process for process in processes if not process["owned"]]
        warm = [process for process in processes if process["owned"] and process.get("warm")]
        busy += [name] if len(orphans) + len(warm) < len(processes) else []
        ready += [name] if warm else []
        if orphans:
            pids = " ".join(str(process["pid"]) for process in orphans)
            age = max(process["age"] for process in orphans)
            findings.append(
                warned(
                    "leftovers",
                    [name],
                    f"{len(orphans)} left-over processes of an earlier job "
                    f"on {name}, the oldest {age:.0f} s old: {orphans[0]['command'][:80]}",
                    f"On {name}: kill -9 {pids}",
                )
            )
    if findings:
        return findings
    notes = [f"a job of yours is running on {join_names(busy)}"] if busy else []
    notes += [f"kept ready: {join_names(ready)} (paceline warm status)"] if ready else []
    text = "; ".join(notes) or "none"
    return [passed("leftovers", survey.names, f"left-over processes of ours: {text}")]


check = Check("leftovers", "Left-overs", "full", evaluate, probe)
