"""Preflight checks: problems that would make a job fail or run slowly.

To add a check, write a module with a ``check`` and add one line to ``CHECKS``. Causes come before
their consequences, because the first failure is the conclusion.
"""

from __future__ import annotations

import importlib

from paceline.checks.check import LEVELS, Check, Level

# level by module; modules are imported on first use
CHECKS: dict[str, Level] = {
    "login": "facts",
    "interpreter": "facts",
    "environment": "facts",
    "torch": "facts",
    "disk": "facts",
    "ports": "quick",
    "port": "quick",
    "folders": "full",
    "data": "full",
    "gpu": "full",
    "rdma": "facts",
    "link": "full",
    "interface": "full",
    "trial": "full",
    "names": "facts",
    "resolution": "quick",
    "clock": "quick",
    "limits": "facts",
    "memory": "facts",
    "mtu": "quick",
    "packages": "full",
    "mpi": "full",
    "leftovers": "full",
    "shell": "facts",
}


def load(name: str) -> Check:
    """Imports and returns the check of that name."""
    check: Check = importlib.import_module(f"paceline.checks.{name}").check
    return check


def checks_up_to(level: Level) -> list[Check]:
    """Returns the checks of this level and of cheaper ones, in order of evaluation."""
    included = LEVELS[: LEVELS.index(level) + 1]
    return [load(name) for name, check_level in CHECKS.items() if check_level in included]
