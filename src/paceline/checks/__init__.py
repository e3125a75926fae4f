"""Preflight checks: problems that would make a job fail or run slowly.

To add a check, write a module with a ``check`` and add one line to ``CHECKS``. Causes come before
their consequences, because the first failure is the conclusion.
"""

from __future__ import annotations

import importlib

from paceline.checks.check import LEVELS, Check, Level

# name → (module, level); modules are imported on first use
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
    """Imports and returns the check of that name."""
    check: Check = importlib.import_module(CHECKS[name][0]).check
    return check


def checks_up_to(level: Level) -> list[Check]:
    """Returns the checks of this level and of cheaper ones, in order of evaluation."""
    included = LEVELS[: LEVELS.index(level) + 1]
    return [load(name) for name, (_, check_level) in CHECKS.items() if check_level in included]
