"""Is there room where a job writes?

Looks at: the work folder, the home folder's cache, /tmp and /dev/shm of every host.
Fails when: one of them has less than 50 MiB or cannot be written to, or the work folder named for
a host does not exist. Warns below 1 GiB, and when /dev/shm is full, which only some jobs use; the
check of the limits warns of a small one.
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
    passed,
    warned,
)
from paceline.remote.fanout import gather_all
from paceline.spec.finding import Finding
from paceline.spec.formatting import shell_text

MIN_FREE_BYTES = 50 << 20
LOW_FREE_BYTES = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - examined, not written to

Disk = Mapping[str, Any]


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns the disks of the work folder and the data; the login returned those of other places.

    For a folder that does not exist an agent examines its nearest parent, which is left out: code
    and data are sent to the cache.
    """
    requirements = session.survey.requirements
    paths = {name: [requirements.workdirs[name], *requirements.data] for name in session.channels}
    answers = await gather_all(
        [session.request(name, "disk", paths=own_paths) for name, own_paths in paths.items()]
    )
    return {
        name: [disk for path, disk in zip(paths[name], answer["disks"], strict=True)
               if Path(path) == Path(disk["path"])]
        for name, answer in zip(paths, answers, strict=True)
    }  # fmt: skip


def evaluate(survey: Survey) -> list[Finding]:
    probed: Mapping[str, list[Disk]] = survey.evidence.get("disk") or {}
    findings = _missing_workdirs(survey, probed)
    for name in survey.names:
        by_use: Mapping[str, Disk] = survey.facts[name].get("disks") or {}
        disks = [*probed.get(name, []), *by_use.values()]
        by_path = {disk["path"]: disk for disk in disks if "free" in disk}
        for path, disk in by_path.items():
            findings += _disk_findings(name, path, disk, by_use)
    return findings or [passed("disk", survey.names, "room in work folder, cache and /tmp")]


def _missing_workdirs(survey: Survey, probed: Mapping[str, list[Disk]]) -> list[Finding]:
    """Reports work folders named for a host that it lacks: the job would start there."""
    findings = []
    for host in survey.present:
        existing = {disk["path"] for disk in probed.get(host.name, []) if "free" in disk}
        if host.workdir and host.name in probed and host.workdir not in existing:
            named = "which was named as its work folder"
            message = f"{host.name} has no folder {host.workdir}, {named}"
            remedy = (
                f"On {host.name}: mkdir -p {shell_text([host.workdir])}\n"
                f"(or change workdir under [hosts.{host.name}] in paceline.toml)"
            )
            findings.append(failed("disk", [host.name], message, remedy))
    return findings


def _disk_findings(name: str, path: str, disk: Disk, by_use: Mapping[str, Disk]) -> list[Finding]:
    free, total = disk["free"], disk["total"]
    room = f"{format_bytes(free)} of {format_bytes(total)} free"
    if path.startswith(SHM):
        if free >= MIN_FREE_BYTES or total < MIN_FREE_BYTES:
            return []
        remedy = (
            f"On {name}: {shell_text(['ls', '-l', path])}, and remove what processes that ended"
            " have left there"
        )
        return [warned("disk", [name], f"{path} on {name} is full: {room}", remedy)]
    uses = [use for use in ("cache", "tmp") if path == (by_use.get(use) or {}).get("path")]
    variables = {"cache": "XDG_CACHE_HOME", "tmp": "TMPDIR"}
    alternative = "".join(
        f"\n(or set {variables[use]} in your login there to a folder that can be written to)"
        for use in uses
    )
    if not disk["writable"]:
        command = "chmod 1777" if "tmp" in uses else "chown $USER"
        quoted = shell_text([path])
        remedy = (
            f"On {name}: sudo {command} {quoted} (or remount it: sudo mount -o remount,rw {quoted})"
            f"{alternative}"
        )
        if path in ("/", "/home"):  # the login's own folder does not exist
            remedy = (
                f"On {name}: work with HOME set to a folder that can be written to{alternative}"
            )
        return [failed("disk", [name], f"{path} on {name} cannot be written to", remedy)]
    command = f"du -xsh {shell_text([path])}/* | sort -h"
    remedy = f"On {name}: free some space ({command}), or work on another disk"
    subject = f"the disk at {path} on {name}"
    if total < MIN_FREE_BYTES and free > total // 2:
        message = f"{subject} is too small: it has {format_bytes(total)} in all"
        return [failed("disk", [name], message, f"Work on another disk{alternative}")]
    if free < MIN_FREE_BYTES:
        return [failed("disk", [name], f"{subject} is full: {room}", remedy + alternative)]
    if free < min(LOW_FREE_BYTES, total // 10):
        return [warned("disk", [name], f"{subject} is nearly full: {room}", remedy)]
    return []


check = Check("disk", "Disk", evaluate, probe)
