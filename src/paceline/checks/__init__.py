"""Preflight: what would go wrong, before it does.

A new check is one module with a ``check`` and one line in ``CHECKS``. From cheap to dear, and
within one price the cause before its consequences: the first failure is the conclusion.
"""

from __future__ import annotations

import importlib

from paceline.checks.check import LEVELS, Check, Level

# name → (module, level): what is not due is not imported
CHECKS: dict[str, tuple[str, Level]] = {
    "login": ("paceline.checks.login", "facts"),
    "interpreter": ("paceline.checks.interpreter", "facts"),
    "environment": ("paceline.checks.environment", "facts"),
    "torch": ("paceline.checks.torch", "facts"),
    "disk": ("paceline.checks.disk", "facts"),
    "ports": ("paceline.checks.ports", "quick"),
    "port": ("paceline.checks.port", "quick"),
    "folders": ("paceline.checks.folders", "full"),
    "data": ("paceline.checks.data", "full"),
    "gpu": ("paceline.checks.gpu", "full"),
    "link": ("paceline.checks.link", "full"),
    "interface": ("paceline.checks.interface", "full"),
    "trial": ("paceline.checks.trial", "full"),
    "names": ("paceline.checks.names", "facts"),
    "resolution": ("paceline.checks.resolution", "quick"),
    "clock": ("paceline.checks.clock", "quick"),
    "limits": ("paceline.checks.limits", "facts"),
    "memory": ("paceline.checks.memory", "facts"),
    "mtu": ("paceline.checks.mtu", "quick"),
    "packages": ("paceline.checks.packages", "full"),
    "mpi": ("paceline.checks.mpi", "full"),
    "leftovers": ("paceline.checks.leftovers", "full"),
    "shell": ("paceline.checks.shell", "facts"),
}


def load(name: str) -> Check:
    """The check of that name, imported now."""
    check: Check = importlib.import_module(CHECKS[name][0]).check
    return check


def due(level: Level) -> list[Check]:
    """The checks of a level and of cheaper ones, in the order in which they are judged."""
    most = LEVELS.index(level)
    return [load(name) for name, (_, own) in CHECKS.items() if LEVELS.index(own) <= most]
