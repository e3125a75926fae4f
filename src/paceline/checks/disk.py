"""Is there room where a job writes?

Looks at: the work folder, the home folder's cache, /tmp and /dev/shm of every host.
Fails when: one of them has less than 50 MiB or cannot be written to, or a work folder that was
named for a host is not there. Warns below 1 GiB, and when /dev/shm is full, which only some jobs
use; that it is small is another check's finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checks.check import Check, Probing, Scene, every, failed, passed, size, warned
from paceline.spec.finding import Finding

NOTHING = 50 << 20
LITTLE = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - looked at, not written to


async def probe(probing: Probing) -> dict[str, Any]:
    """The work folders and data where they exist; the other places came with the login.

    For a folder that does not exist an agent looks at its nearest parent. Nothing is written
    there: code and data are sent to the cache.
    """
    names = list(probing.channels)
    paths = [[probing.scene.wishes.workdirs[name], *probing.scene.wishes.data] for name in names]
    answers = await every(
        [probing.ask(name, "disk", paths=own) for name, own in zip(names, paths, strict=True)]
    )
    return {
        name: [disk for path, disk in zip(own, answer["disks"], strict=True)
               if Path(path) == Path(disk["path"])]
        for name, own, answer in zip(names, paths, answers, strict=True)
    }  # fmt: skip


def judge(scene: Scene) -> list[Finding]:
    found = _missing(scene)
    for name in scene.names:
        for path, disk in _places(scene, name).items():
            known = scene.facts[name].get("disks") or {}
            found += _place(name, path, disk, known)
    return found or [passed("disk", scene.names, "room in work folder, cache and /tmp")]


def _missing(scene: Scene) -> list[Finding]:
    """Work folders named for a host: code is shipped elsewhere, but the job would start there."""
    asked = scene.evidence.get("disk") or {}
    there = {name: {disk["path"] for disk in asked.get(name, []) if "free" in disk}
             for name in asked}  # fmt: skip
    named = {host.name: host.workdir for host in scene.present if host.workdir}
    return [
        failed(
            "disk",
            [name],
            f"{name} has no folder {folder}, which was named as its work folder",
            f"On {name}: mkdir -p {folder}\n"
            f"(or change workdir under [hosts.{name}] in paceline.toml)",
        )
        for name, folder in named.items()
        if name in there and folder not in there[name]
    ]


def _places(scene: Scene, name: str) -> dict[str, Mapping[str, Any]]:
    """By path, each once. The cache's path is that of its first folder that exists."""
    known = scene.facts[name].get("disks") or {}
    asked = (scene.evidence.get("disk") or {}).get(name, [])
    return {disk["path"]: disk for disk in [*asked, *known.values()] if "free" in disk}


def _place(name: str, path: str, disk: Mapping[str, Any],
           known: Mapping[str, Mapping[str, Any]]) -> list[Finding]:  # fmt: skip
    free, total = disk["free"], disk["total"]
    variables = {"cache": "XDG_CACHE_HOME", "tmp": "TMPDIR"}
    elsewhere = "".join(
        f"\n(or set {variable} in your login there to a folder that can be written to)"
        for use, variable in variables.items()
        if path == (known.get(use) or {}).get("path")
    )
    remedy = f"On {name}: free some space (du -xsh {path}/* | sort -h), or work on another disk"
    if path.startswith(SHM):
        return _shared_memory(name, path, free, total)
    if not disk["writable"]:
        grant = "chmod 1777" if path == (known.get("tmp") or {}).get("path") else "chown $USER"
        return [
            failed(
                "disk",
                [name],
                f"{path} on {name} cannot be written to",
                f"On {name}: sudo {grant} {path} (or remount it: sudo mount -o remount,rw {path})"
                f"{elsewhere}",
            )
        ]
    if total < NOTHING and free > total // 2:
        message = f"the disk at {path} on {name} is too small: it has {size(total)} in all"
        return [failed("disk", [name], message, f"Work on another disk{elsewhere}")]
    if free < NOTHING:
        return [
            failed(
                "disk",
                [name],
                f"the disk at {path} on {name} is full: {size(free)} of {size(total)} free",
                remedy + elsewhere,
            )
        ]
    if free < min(LITTLE, total // 10):
        return [
            warned(
                "disk",
                [name],
                f"the disk at {path} on {name} is nearly full: {size(free)} of {size(total)} free",
                remedy,
            )
        ]
    return []


def _shared_memory(name: str, path: str, free: int, total: int) -> list[Finding]:
    """Data loaders with workers and NCCL need it; other jobs do without."""
    if free >= NOTHING or total < NOTHING:
        return []
    message = f"{path} on {name} is full: {size(free)} of {size(total)} free"
    remedy = f"On {name}: ls -l {path}, and remove what processes that ended have left there"
    return [warned("disk", [name], message, remedy)]


check = Check("disk", "Disk", "facts", judge, probe)
