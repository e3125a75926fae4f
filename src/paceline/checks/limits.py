"""Are the limits high enough?

Looks at: open files, and the size of /dev/shm.
Warns when: a process may open fewer than 1024 files, or /dev/shm is below 256 MiB (containers
get 64 MiB by default; NCCL and data loaders need more).
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, format_bytes, passed, warned
from paceline.spec.finding import Finding

MIN_OPEN_FILES = 1024
MIN_SHM_BYTES = 256 << 20
SHM = "/dev/shm"  # noqa: S108 - examined, not written to


def evaluate(survey: Survey) -> list[Finding]:
    findings = []
    for name in survey.names:
        limits = survey.facts[name]["limits"] or {}
        files, memory = limits.get("nofile", -1), limits.get("shm", MIN_SHM_BYTES)
        if 0 <= files < MIN_OPEN_FILES:
            message = f"{name} allows only {files} open files a process"
            line = "`* soft nofile 65536`"
            remedy = f"On {name}: add {line} to /etc/security/limits.conf, log in again"
            findings.append(warned("limits", [name], message, remedy))
        if memory < MIN_SHM_BYTES:
            size = format_bytes(memory)
            message = f"{SHM} on {name} has {size}: too little for data loaders and NCCL"
            remedy = f"On {name}: sudo mount -o remount,size=2g {SHM}\n(Docker: --shm-size=2g)"
            findings.append(warned("limits", [name], message, remedy))
    return findings or [passed("limits", survey.names, "open files and /dev/shm suffice")]


check = Check("limits", "Limits", evaluate)
