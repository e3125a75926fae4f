"""What starts the nodes of a job: one file a scheduler, with all its verbs, imported when used.

To add one: write ``NAME.py`` with ``SCHEDULER``, an instance of a class of your own (see
:mod:`paceline.schedulers.scheduler`), and put its name here.
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
DEFAULT = "ssh"  # where nothing else was asked for
FOR_IMAGES = "docker"  # where only an image was named
BY_HAND = "rdzv"  # asked for by an option of its own


def load(name: str) -> Scheduler:
    """The scheduler of a name. SettingError when there is none."""
    if name not in SCHEDULERS:
        raise SettingError(f"there is no scheduler `{name}`", found=", ".join(SCHEDULERS))
    found: Scheduler = importlib.import_module(f"paceline.schedulers.{name}").SCHEDULER
    return found


def inside(environ: Mapping[str, str]) -> Scheduler | None:
    """The scheduler in whose allocation we are. Its variables begin with its name."""
    for name in SCHEDULERS:
        prefix = f"{name.upper()}_"
        if any(variable.startswith(prefix) for variable in environ):
            scheduler = load(name)
            if scheduler.allocation(environ) is not None:
                return scheduler
    return None
