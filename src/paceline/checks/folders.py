"""Which hosts see the same work folder, and can it be written to as checkpoints are?

Looks at: a small file that each host leaves in the work folder (and in folders given with
--shared) by writing and renaming, and which of them the others see.
Fails when: a folder given with --shared is not there, is not the same one, or does not take a
file on some host. A private work folder is no fault: code is shipped and results come back.
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
    gather_all,
    join_names,
    passed,
)
from paceline.spec.finding import Finding


async def probe(session: ProbeSession) -> dict[str, Any]:
    """By folder (``workdir`` for the work folders): what each host wrote and saw."""
    requirements = session.survey.requirements
    places = {"workdir": dict(requirements.workdirs)}
    places |= {path: dict.fromkeys(session.channels, path) for path in requirements.shared}
    return {label: await _probe_folder(session, folders) for label, folders in places.items()}


async def _probe_folder(session: ProbeSession, folders: Mapping[str, str]) -> dict[str, Any]:
    mark = secrets.token_hex(6)
    files = {name: f".paceline-{mark}-{at}" for at, name in enumerate(session.channels)}
    written = await gather_all(
        [
            session.request(n, "leave_token", folder=folders[n], file=files[n], content=mark)
            for n in session.channels
        ]
    )
    try:
        seen = await gather_all(
            [
                session.request(n, "see_tokens", folder=folders[n], names=list(files.values()))
                for n in session.channels
            ]
        )
    finally:
        await gather_all(
            [
                session.request(n, "take_token", folder=folders[n], file=files[n])
                for n in session.channels
            ]
        )
    result = {}
    for name, wrote, reply in zip(session.channels, written, seen, strict=True):
        sees = [writer for writer, file in files.items() if reply["seen"].get(file) == mark]
        wrote = {key: value for key, value in wrote.items() if key != "re"}
        result[name] = {
            "folder": folders[name],
            "wrote": wrote,
            "sees": sees,
            "exists": reply["exists"],
            "type": reply["type"],
        }
    return result


def evaluate(survey: Survey) -> list[Finding]:
    findings: list[Finding] = []
    for label, places in survey.evidence["folders"].items():
        findings += (
            _shared_findings(label, places) if label != "workdir" else [_workdir_finding(places)]
        )
    return findings


def _shared_findings(path: str, places: Mapping[str, Any]) -> list[Finding]:
    missing = [name for name, place in places.items() if not place["exists"]]
    if missing:
        return [
            failed(
                "folders",
                missing,
                f"{path} does not exist on {join_names(missing)}",
                f"Mount it there: paceline setup mounts prints the lines; on "
                f"{join_names(missing)}: sudo mkdir -p {path} first",
            )
        ]
    for name, place in places.items():
        if not place["wrote"]["ok"]:
            return [
                failed(
                    "folders",
                    [name],
                    f"{path} on {name} does not take files "
                    f"({place['wrote']['step']}: {place['wrote']['why']})",
                    f"On {name}: ls -ld {path}; mount | grep {path} (read-only? other owner?)",
                )
            ]
    groups = storage_groups(places)
    if len(groups) > 1:
        deviating = [name for group in sorted(groups, key=len)[:-1] for name in group]
        kinds = ", ".join(f"{name} {places[name]['type'] or 'unknown'}" for name in places)
        return [
            failed(
                "folders",
                deviating,
                f"{path} on {join_names(deviating)} is not the folder that the others see ({kinds})",
                f"On {join_names(deviating)}: mount | grep {path}; the exact lines: paceline setup mounts",
            )
        ]
    return [passed("folders", tuple(places), f"{path} is one folder on all hosts")]


def _workdir_finding(places: Mapping[str, Any]) -> Finding:
    groups = [group for group in storage_groups(places) if places[group[0]]["exists"]]
    if len(groups) == 1 and len(groups[0]) == len(places):
        return passed("folders", tuple(places), "all hosts see one work folder")
    shared = [join_names(group) for group in groups if len(group) > 1]
    text = f"; shared by {'; by '.join(shared)}" if shared else ""
    return passed(
        "folders",
        tuple(places),
        f"work folders are private to hosts, code is shipped and results are brought back{text}",
    )


def storage_groups(places: Mapping[str, Any]) -> list[list[str]]:
    """Hosts that see each other's files, in order."""
    groups: list[list[str]] = []
    for name, place in places.items():
        for group in groups:
            if group[0] in place["sees"] and name in places[group[0]]["sees"]:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


check = Check("folders", "Folders", "full", evaluate, probe)
