"""Plans for the lab's unit tests."""

from __future__ import annotations

from typing import Any

from paceline.lab.plan import LabOptions, LabPlan, Surroundings, plan_lab

AROUND = Surroundings(
    python="/venv/bin/python",
    shared=("/venv", "/tmp/project"),
    uid=1000,
    gid=1000,
    user="ann",
    shell="/bin/bash",
)


def plan(**options: Any) -> LabPlan:
    """The plan of a lab called ``test``."""
    return plan_lab(LabOptions(name="test", **options), AROUND)
