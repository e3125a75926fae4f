"""Schedulers start the nodes of a job; each has a module, which is imported on first use.

To add one, write ``NAME.py`` with ``SCHEDULER``, an instance of your class (see
:mod:`paceline.schedulers.scheduler`), and add its name here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from paceline.schedulers.scheduler import Scheduler
from paceline.spec.errors import SettingError

SCHEDULERS = (
    "ssh",
    "local",
    "mpi",
    "slurm",
    "docker",
    "podman",
    "apptainer",
    "rdzv",
    "pbs",
    "lsf",
    "kubernetes",
)
DEFAULT = "ssh"
FOR_IMAGES = "docker"  # the default with --image
BY_HAND = "rdzv"  # selected by --rdzv


def load(name: str) -> Scheduler:
    """Returns the scheduler of a name. Raises SettingError if there is none."""
    if name not in SCHEDULERS:
        raise SettingError(f"there is no scheduler `{name}`", found=", ".join(SCHEDULERS))
    scheduler: Scheduler = importlib.import_module(f"paceline.schedulers.{name}").SCHEDULER
    return scheduler


def current_scheduler(environ: Mapping[str, str]) -> Scheduler | None:
    """Returns the scheduler whose allocation we are in; its variables begin with its name."""
    for name in SCHEDULERS:
        prefix = f"{name.upper()}_"
        if any(variable.startswith(prefix) for variable in environ):
            scheduler = load(name)
            if scheduler.allocation(environ) is not None:
                return scheduler
    return None
