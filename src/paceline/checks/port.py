"""Is the rendezvous port that was asked for free?

Looks at: the first host, the port given by --master-port.
Fails when: somebody has it: which process, how old, and whether it is a left-over of ours.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, Probing, Scene, failed, passed
from paceline.spec.finding import Finding


async def probe(probing: Probing) -> dict[str, Any]:
    """Takes the port for a moment."""
    port, first = probing.scene.wishes.master_port, next(iter(probing.channels))
    if not port:
        return {"asked": False}
    address = probing.scene.address(first) if len(probing.channels) > 1 else "127.0.0.1"
    answer = await probing.ask(first, "open_ports", address=address, ports=[port])
    owners = await probing.ask(first, "token_processes")
    await probing.ask(first, "stop_listening")
    return {"asked": True, "port": port, "taken": answer["taken"], "ours": owners["processes"]}


def judge(scene: Scene) -> list[Finding]:
    found, first = scene.evidence["port"], scene.names[0]
    if not found["asked"]:
        return [passed("port", [first], "the rendezvous port will be a free one, held")]
    port = found["port"]
    if not found["taken"]:
        return [passed("port", [first], f"port {port} is free on {first}")]
    taken = found["taken"][str(port)]
    holders = [_holder(pid, command, found["ours"]) for pid, command in taken["holders"]]
    who = ", ".join(holders) or "a process of another user"
    pids = " ".join(str(pid) for pid, _ in taken["holders"])
    end = f", or\nOn {first}: kill {pids}" if pids else ""
    return [
        failed(
            "port",
            [first],
            f"port {port} on {first} is taken by {who} ({taken['error']})",
            f"Leave --master-port out to get a free one{end}",
        )
    ]


def _holder(pid: int, command: str, ours: list[dict[str, Any]]) -> str:
    text = f"process {pid} ({command[:80]})"
    own = [process for process in ours if process["pid"] == pid]
    if not own:
        return text
    state = "a running job" if own[0]["owned"] else "a left-over"
    return f"{text}, {state} of paceline, {own[0]['age']:.0f} s old"


check = Check("port", "Rendezvous port", "quick", judge, probe)
