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

from paceline.checks.check import Check, Probing, Scene, every, failed, listed, passed
from paceline.spec.finding import Finding


async def probe(probing: Probing) -> dict[str, Any]:
    """By folder (``workdir`` for the work folders): what each host wrote and saw."""
    wishes = probing.scene.wishes
    places = {"workdir": dict(wishes.workdirs)}
    places |= {path: dict.fromkeys(probing.channels, path) for path in wishes.shared}
    return {label: await _place(probing, folders) for label, folders in places.items()}


async def _place(probing: Probing, folders: Mapping[str, str]) -> dict[str, Any]:
    mark = secrets.token_hex(6)
    files = {name: f".paceline-{mark}-{at}" for at, name in enumerate(probing.channels)}
    left = await every(
        [
            probing.ask(n, "leave_token", folder=folders[n], file=files[n], content=mark)
            for n in probing.channels
        ]
    )
    try:
        seen = await every(
            [
                probing.ask(n, "see_tokens", folder=folders[n], names=list(files.values()))
                for n in probing.channels
            ]
        )
    finally:
        await every(
            [
                probing.ask(n, "take_token", folder=folders[n], file=files[n])
                for n in probing.channels
            ]
        )
    found = {}
    for name, wrote, saw in zip(probing.channels, left, seen, strict=True):
        sees = [other for other, file in files.items() if saw["seen"].get(file) == mark]
        wrote = {key: value for key, value in wrote.items() if key != "re"}
        found[name] = {
            "folder": folders[name],
            "wrote": wrote,
            "sees": sees,
            "exists": saw["exists"],
            "type": saw["type"],
        }
    return found


def judge(scene: Scene) -> list[Finding]:
    found: list[Finding] = []
    for label, places in scene.evidence["folders"].items():
        found += _shared(label, places) if label != "workdir" else [_work(places)]
    return found


def _shared(path: str, places: Mapping[str, Any]) -> list[Finding]:
    missing = [name for name, place in places.items() if not place["exists"]]
    if missing:
        return [
            failed(
                "folders",
                missing,
                f"{path} does not exist on {listed(missing)}",
                f"Mount it there: paceline setup mounts prints the lines; on "
                f"{listed(missing)}: sudo mkdir -p {path} first",
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
        odd = [name for group in sorted(groups, key=len)[:-1] for name in group]
        kinds = ", ".join(f"{name} {places[name]['type'] or 'unknown'}" for name in places)
        return [
            failed(
                "folders",
                odd,
                f"{path} on {listed(odd)} is not the folder that the others see ({kinds})",
                f"On {listed(odd)}: mount | grep {path}; the exact lines: paceline setup mounts",
            )
        ]
    return [passed("folders", tuple(places), f"{path} is one folder on all hosts")]


def _work(places: Mapping[str, Any]) -> Finding:
    groups = [group for group in storage_groups(places) if places[group[0]]["exists"]]
    if len(groups) == 1 and len(groups[0]) == len(places):
        return passed("folders", tuple(places), "all hosts see one work folder")
    shared = [listed(group) for group in groups if len(group) > 1]
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


check = Check("folders", "Folders", "full", judge, probe)
