"""Can we log in to every host?

Looks at: the outcome of every login, made at once, sorted by cause.
Fails when: a host refuses or does not answer. The remedy depends on the cause: name, route,
port, host key, key, user, permissions, login shell, Python.
"""

from __future__ import annotations

import re

from paceline.checks.check import Check, Scene, failed, listed, passed
from paceline.remote.openssh import CAUSES
from paceline.spec.finding import Finding


def judge(scene: Scene) -> list[Finding]:
    found = [
        failed(
            "login",
            [host.name],
            f"cannot log in to {host.name}: {said['cause']}: {_line(said['cause'], said['found'])}",
            said["remedy"],
        )
        for host in scene.hosts
        if (said := scene.refusals.get(host.name))
    ]
    if scene.names:
        found.append(passed("login", scene.names, f"logged in to {listed(scene.names)}"))
    return found


def _line(cause: str, text: str) -> str:
    """The line of ssh's words by which the cause was known, else the last."""
    pattern = next((known.pattern for known in CAUSES if known.name == cause), "$^")
    lines = [line for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(pattern, line)]
    return (telling or lines or ["no word"])[-1]


check = Check("login", "Login", "facts", judge)
