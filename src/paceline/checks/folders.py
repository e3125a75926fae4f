"""Which hosts see the same work folder, and can it be written to as checkpoints are?

Looks at: a small file that each host writes and renames in the work folder (and in folders given
with --shared), and which of these files the other hosts see.
Fails when: a folder given with --shared is missing on a host, is not the same folder, or cannot be
written to. A private work folder is no fault: code is shipped and results come back.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from paceline.checks.check import (
    Check,
    ProbeSession,
    Survey,
    failed,
    join_names,
    passed,
)
from paceline.remote.fanout import gather_all
from paceline.spec.finding import Finding


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns what each host wrote and saw, by folder (``workdir`` for the work folders)."""
    requirements = session.survey.requirements
    places = {"workdir": dict(requirements.workdirs)}
    places |= {path: dict.fromkeys(session.channels, path) for path in requirements.shared}
    return {label: await _probe_folder(session, folders) for label, folders in places.items()}


async def _probe_folder(session: ProbeSession, folders: Mapping[str, str]) -> dict[str, Any]:
    mark = secrets.token_hex(6)
    files = {name: f".paceline-{mark}-{index}" for index, name in enumerate(session.channels)}

    async def request(op: str, **fields: Any) -> list[dict[str, Any]]:
        own_file = op != "see_tokens"
        return await gather_all([
            session.request(name, op, folder=folders[name], **fields,
                            **({"file": files[name]} if own_file else {}))
            for name in session.channels
        ])  # fmt: skip

    written = await request("leave_token", content=mark)
    try:
        seen = await request("see_tokens", names=list(files.values()))
    finally:
        await request("take_token")
    return {
        name: {
            "folder": folders[name],
            "wrote": {key: value for key, value in wrote.items() if key != "re"},
            "sees": [writer for writer, file in files.items() if reply["seen"].get(file) == mark],
            "exists": reply["exists"],
            "type": reply["type"],
        }
        for name, wrote, reply in zip(session.channels, written, seen, strict=True)
    }


def evaluate(survey: Survey) -> list[Finding]:
    return [
        _workdir_finding(places) if label == "workdir" else _shared_finding(label, places)
        for label, places in survey.evidence["folders"].items()
    ]


def _shared_finding(path: str, places: Mapping[str, Any]) -> Finding:
    missing = [name for name, place in places.items() if not place["exists"]]
    if missing:
        hosts = join_names(missing)
        message = f"{path} does not exist on {hosts}"
        remedy = (
            f"Mount it there: paceline setup mounts prints the lines; on {hosts}: "
            f"sudo mkdir -p {path} first"
        )
        return failed("folders", missing, message, remedy)
    for name, place in places.items():
        wrote = place["wrote"]
        if not wrote["ok"]:
            message = f"{path} on {name} does not take files ({wrote['step']}: {wrote['why']})"
            remedy = f"On {name}: ls -ld {path}; mount | grep {path} (read-only? other owner?)"
            return failed("folders", [name], message, remedy)
    groups = storage_groups(places)
    if len(groups) > 1:
        deviating = [name for group in sorted(groups, key=len)[:-1] for name in group]
        hosts = join_names(deviating)
        kinds = ", ".join(f"{name} {places[name]['type'] or 'unknown'}" for name in places)
        message = f"{path} on {hosts} is not the folder that the others see ({kinds})"
        remedy = f"On {hosts}: mount | grep {path}; the exact lines: paceline setup mounts"
        return failed("folders", deviating, message, remedy)
    return passed("folders", tuple(places), f"{path} is one folder on all hosts")


def _workdir_finding(places: Mapping[str, Any]) -> Finding:
    groups = [group for group in storage_groups(places) if places[group[0]]["exists"]]
    if len(groups) == 1 and len(groups[0]) == len(places):
        return passed("folders", tuple(places), "all hosts see one work folder")
    shared = [join_names(group) for group in groups if len(group) > 1]
    text = f"; shared by {'; by '.join(shared)}" if shared else ""
    message = "work folders are private to hosts, code is shipped and results are brought back"
    return passed("folders", tuple(places), f"{message}{text}")


def storage_groups(places: Mapping[str, Any]) -> list[list[str]]:
    """Groups the hosts that see each other's files, in order."""
    groups: list[list[str]] = []
    for name, place in places.items():
        for group in groups:
            if group[0] in place["sees"] and name in places[group[0]]["sees"]:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


check = Check("folders", "Folders", evaluate, probe)
