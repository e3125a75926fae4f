"""Are the limits high enough?

Looks at: open files, the size of /dev/shm, locked memory (with InfiniBand hardware only).
Warns when: fewer than 1024 files may be open, or /dev/shm is smaller than 256 MiB (containers
get 64 MiB unless told otherwise; NCCL and data loaders need more).
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, format_bytes, passed, warned
from paceline.spec.finding import Finding

MIN_OPEN_FILES = 1024
MIN_SHM_BYTES = 256 << 20
SHM = "/dev/shm"  # noqa: S108 - looked at, not written to


def evaluate(survey: Survey) -> list[Finding]:
    findings = [finding for name in survey.names for finding in _host(survey, name)]
    return findings or [passed("limits", survey.names, "open files and /dev/shm suffice")]


def _host(survey: Survey, name: str) -> list[Finding]:
    limits = survey.facts[name]["limits"] or {}
    findings = []
    files, memory = limits.get("nofile", -1), limits.get("shm", MIN_SHM_BYTES)
    if 0 <= files < MIN_OPEN_FILES:
        findings.append(
            warned(
                "limits",
                [name],
                f"{name} allows only {files} open files a process",
                f"On {name}: add `* soft nofile 65536` to /etc/security/limits.conf, log in again",
            )
        )
    if memory < MIN_SHM_BYTES:
        findings.append(
            warned(
                "limits",
                [name],
                f"{SHM} on {name} has {format_bytes(memory)}: too little for data loaders and NCCL",
                f"On {name}: sudo mount -o remount,size=2g {SHM}\n(Docker: --shm-size=2g)",
            )
        )
    return findings


check = Check("limits", "Limits", "facts", evaluate)
