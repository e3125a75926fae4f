"""Preflight: what would go wrong, before it does.

A new check is one module with a ``check`` and one line in ``CHECKS``. From cheap to dear, and
within one price the cause before its consequences: the first failure is the conclusion.
"""

from __future__ import annotations

import importlib

from paceline.checks.check import Check

CHECKS: dict[str, str] = {
    "login": "paceline.checks.login",
    "interpreter": "paceline.checks.interpreter",
    "torch": "paceline.checks.torch",
    "disk": "paceline.checks.disk",
    "ports": "paceline.checks.ports",
    "port": "paceline.checks.port",
    "folders": "paceline.checks.folders",
    "data": "paceline.checks.data",
    "gpu": "paceline.checks.gpu",
    "link": "paceline.checks.link",
    "interface": "paceline.checks.interface",
    "names": "paceline.checks.names",
    "resolution": "paceline.checks.resolution",
    "clock": "paceline.checks.clock",
    "limits": "paceline.checks.limits",
    "mtu": "paceline.checks.mtu",
    "packages": "paceline.checks.packages",
    "leftovers": "paceline.checks.leftovers",
    "shell": "paceline.checks.shell",
}


def load(name: str) -> Check:
    """The check of that name, imported now."""
    check: Check = importlib.import_module(CHECKS[name]).check
    return check


def load_all() -> list[Check]:
    """Every check, in the order in which they are judged."""
    return [load(name) for name in CHECKS]
