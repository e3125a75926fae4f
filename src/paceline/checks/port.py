"""Is the rendezvous port that was asked for free?

Looks at: the first host, the port given by --master-port.
Fails when: somebody has it: which process, how old, and whether it is a left-over of ours.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, failed, passed
from paceline.spec.finding import Finding


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Takes the port for a moment."""
    port, first = session.survey.requirements.master_port, next(iter(session.channels))
    if not port:
        return {"asked": False}
    address = session.survey.address(first) if len(session.channels) > 1 else "127.0.0.1"
    answer = await session.request(first, "open_ports", address=address, ports=[port])
    owners = await session.request(first, "token_processes")
    await session.request(first, "stop_listening")
    return {"asked": True, "port": port, "taken": answer["taken"], "ours": owners["processes"]}


def evaluate(survey: Survey) -> list[Finding]:
    evidence, first = survey.evidence["port"], survey.names[0]
    if not evidence["asked"]:
        return [passed("port", [first], "the rendezvous port will be a free one, held")]
    port = evidence["port"]
    if not evidence["taken"]:
        return [passed("port", [first], f"port {port} is free on {first}")]
    conflict = evidence["taken"][str(port)]
    holders = [_holder(pid, command, evidence["ours"]) for pid, command in conflict["holders"]]
    processes = ", ".join(holders) or "a process of another user"
    pids = " ".join(str(pid) for pid, _ in conflict["holders"])
    alternative = f", or\nOn {first}: kill {pids}" if pids else ""
    return [
        failed(
            "port",
            [first],
            f"port {port} on {first} is taken by {processes} ({conflict['error']})",
            f"Leave --master-port out to get a free one{alternative}",
        )
    ]


def _holder(pid: int, command: str, job_processes_of_ours: list[dict[str, Any]]) -> str:
    text = f"process {pid} ({command[:80]})"
    owners = [process for process in job_processes_of_ours if process["pid"] == pid]
    if not owners:
        return text
    state = "a running job" if owners[0]["owned"] else "a left-over"
    return f"{text}, {state} of paceline, {owners[0]['age']:.0f} s old"


check = Check("port", "Rendezvous port", "quick", evaluate, probe)
