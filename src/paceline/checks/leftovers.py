"""Are processes of earlier jobs still there?

Looks at: processes that carry a job's token, and whether an agent owns them.
Warns when: no agent owns them. Running jobs of yours, and hosts that are kept ready for your next
command, are only mentioned.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, join_names, passed, warned
from paceline.spec.finding import Finding


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns the processes with a token, by host."""
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
            age_s = max(process["age"] for process in orphans)
            message = (
                f"{len(orphans)} left-over processes of an earlier job on {name}, "
                f"the oldest {age_s:.0f} s old: {orphans[0]['command'][:80]}"
            )
            pids = " ".join(str(process["pid"]) for process in orphans)
            findings.append(warned("leftovers", [name], message, f"On {name}: kill -9 {pids}"))
    if findings:
        return findings
    notes = [f"a job of yours is running on {join_names(busy)}"] if busy else []
    notes += [f"kept ready: {join_names(ready)} (paceline warm status)"] if ready else []
    message = f"left-over processes of ours: {'; '.join(notes) or 'none'}"
    return [passed("leftovers", survey.names, message)]


check = Check("leftovers", "Left-overs", evaluate, probe)
