"""Are the limits high enough?

Looks at: open files, the size of /dev/shm, locked memory (with InfiniBand hardware only).
Warns when: fewer than 1024 files may be open, or /dev/shm is smaller than 256 MiB (containers
get 64 MiB unless told otherwise; NCCL and data loaders need more).
"""

from __future__ import annotations

from paceline.checks.check import Check, Scene, passed, size, warned
from paceline.spec.finding import Finding

FILES = 1024
SHARED_MEMORY = 256 << 20
SHM = "/dev/shm"  # noqa: S108 - looked at, not written to


def judge(scene: Scene) -> list[Finding]:
    found = [finding for name in scene.names for finding in _host(scene, name)]
    return found or [passed("limits", scene.names, "open files and /dev/shm suffice")]


def _host(scene: Scene, name: str) -> list[Finding]:
    limits = scene.facts[name]["limits"] or {}
    found = []
    files, memory = limits.get("nofile", -1), limits.get("shm", SHARED_MEMORY)
    if 0 <= files < FILES:
        found.append(
            warned(
                "limits",
                [name],
                f"{name} allows only {files} open files a process",
                f"On {name}: add `* soft nofile 65536` to /etc/security/limits.conf, log in again",
            )
        )
    if memory < SHARED_MEMORY:
        found.append(
            warned(
                "limits",
                [name],
                f"{SHM} on {name} has {size(memory)}: too little for data loaders and NCCL",
                f"On {name}: sudo mount -o remount,size=2g {SHM}\n(Docker: --shm-size=2g)",
            )
        )
    return found


check = Check("limits", "Limits", "facts", judge)
