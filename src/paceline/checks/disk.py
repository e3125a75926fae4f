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

from paceline.checks.check import (
    Check,
    ProbeSession,
    Survey,
    failed,
    format_bytes,
    gather_all,
    passed,
    warned,
)
from paceline.spec.finding import Finding

MIN_FREE_BYTES = 50 << 20
LOW_FREE_BYTES = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - looked at, not written to


async def probe(session: ProbeSession) -> dict[str, Any]:
    """The work folders and data where they exist; the other places came with the login.

    For a folder that does not exist an agent looks at its nearest parent. Nothing is written
    there: code and data are sent to the cache.
    """
    names = list(session.channels)
    paths = [
        [session.survey.requirements.workdirs[name], *session.survey.requirements.data]
        for name in names
    ]
    answers = await gather_all(
        [
            session.request(name, "disk", paths=host_paths)
            for name, host_paths in zip(names, paths, strict=True)
        ]
    )
    return {
        name: [disk for path, disk in zip(host_paths, answer["disks"], strict=True)
               if Path(path) == Path(disk["path"])]
        for name, host_paths, answer in zip(names, paths, answers, strict=True)
    }  # fmt: skip


def evaluate(survey: Survey) -> list[Finding]:
    findings = _missing_workdirs(survey)
    for name in survey.names:
        for path, disk in _disks(survey, name).items():
            disks_by_use = survey.facts[name].get("disks") or {}
            findings += _disk_findings(name, path, disk, disks_by_use)
    return findings or [passed("disk", survey.names, "room in work folder, cache and /tmp")]


def _missing_workdirs(survey: Survey) -> list[Finding]:
    """Work folders named for a host: code is shipped elsewhere, but the job would start there."""
    probed = survey.evidence.get("disk") or {}
    existing = {name: {disk["path"] for disk in probed.get(name, []) if "free" in disk}
             for name in probed}  # fmt: skip
    workdirs = {host.name: host.workdir for host in survey.present if host.workdir}
    return [
        failed(
            "disk",
            [name],
            f"{name} has no folder {folder}, which was named as its work folder",
            f"On {name}: mkdir -p {folder}\n"
            f"(or change workdir under [hosts.{name}] in paceline.toml)",
        )
        for name, folder in workdirs.items()
        if name in existing and folder not in existing[name]
    ]


def _disks(survey: Survey, name: str) -> dict[str, Mapping[str, Any]]:
    """By path, each once. The cache's path is that of its first folder that exists."""
    disks_by_use = survey.facts[name].get("disks") or {}
    probed = (survey.evidence.get("disk") or {}).get(name, [])
    return {disk["path"]: disk for disk in [*probed, *disks_by_use.values()] if "free" in disk}


def _disk_findings(name: str, path: str, disk: Mapping[str, Any],
           disks_by_use: Mapping[str, Mapping[str, Any]]) -> list[Finding]:  # fmt: skip
    free, total = disk["free"], disk["total"]
    variables = {"cache": "XDG_CACHE_HOME", "tmp": "TMPDIR"}
    alternative = "".join(
        f"\n(or set {variable} in your login there to a folder that can be written to)"
        for use, variable in variables.items()
        if path == (disks_by_use.get(use) or {}).get("path")
    )
    remedy = f"On {name}: free some space (du -xsh {path}/* | sort -h), or work on another disk"
    if path.startswith(SHM):
        return _shared_memory(name, path, free, total)
    if not disk["writable"]:
        command = (
            "chmod 1777" if path == (disks_by_use.get("tmp") or {}).get("path") else "chown $USER"
        )
        return [
            failed(
                "disk",
                [name],
                f"{path} on {name} cannot be written to",
                f"On {name}: sudo {command} {path} (or remount it: sudo mount -o remount,rw {path})"
                f"{alternative}",
            )
        ]
    if total < MIN_FREE_BYTES and free > total // 2:
        message = f"the disk at {path} on {name} is too small: it has {format_bytes(total)} in all"
        return [failed("disk", [name], message, f"Work on another disk{alternative}")]
    if free < MIN_FREE_BYTES:
        return [
            failed(
                "disk",
                [name],
                f"the disk at {path} on {name} is full: {format_bytes(free)} of {format_bytes(total)} free",
                remedy + alternative,
            )
        ]
    if free < min(LOW_FREE_BYTES, total // 10):
        return [
            warned(
                "disk",
                [name],
                f"the disk at {path} on {name} is nearly full: {format_bytes(free)} of {format_bytes(total)} free",
                remedy,
            )
        ]
    return []


def _shared_memory(name: str, path: str, free: int, total: int) -> list[Finding]:
    """Data loaders with workers and NCCL need it; other jobs do without."""
    if free >= MIN_FREE_BYTES or total < MIN_FREE_BYTES:
        return []
    message = f"{path} on {name} is full: {format_bytes(free)} of {format_bytes(total)} free"
    remedy = f"On {name}: ls -l {path}, and remove what processes that ended have left there"
    return [warned("disk", [name], message, remedy)]


check = Check("disk", "Disk", "facts", evaluate, probe)
