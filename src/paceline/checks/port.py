"""Is the requested rendezvous port free?

Looks at: the first host, the port given by --master-port.
Fails when: a process has the port: which one, how old, and whether it is left over from a job.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, failed, passed
from paceline.spec.finding import Finding


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Binds the port for a moment."""
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
    message = f"port {port} on {first} is taken by {processes} ({conflict['error']})"
    pids = " ".join(str(pid) for pid, _ in conflict["holders"])
    alternative = f", or\nOn {first}: kill {pids}" if pids else ""
    remedy = f"Leave --master-port out to get a free one{alternative}"
    return [failed("port", [first], message, remedy)]


def _holder(pid: int, command: str, job_processes: list[dict[str, Any]]) -> str:
    text = f"process {pid} ({command[:80]})"
    for process in job_processes:
        if process["pid"] == pid:
            state = "a running job" if process["owned"] else "a left-over"
            return f"{text}, {state} of paceline, {process['age']:.0f} s old"
    return text


check = Check("port", "Rendezvous port", evaluate, probe)
