"""Ways to start one agent a node: one module each, imported when it is used.

A module has ``transport(options) -> Transport``. A new one is one file and one line in ``WAYS``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.schedulers.options import ContainerOptions, Options
from paceline.spec.errors import SettingError

if TYPE_CHECKING:
    from paceline.remote.transport import Transport

# name → (module, one line for people)
WAYS: dict[str, tuple[str, str]] = {
    "ssh": ("paceline.schedulers.ssh", "one OpenSSH login a host"),
    "local": ("paceline.schedulers.local", "this machine, no network"),
    "mpi": ("paceline.schedulers.mpi", "mpiexec of Intel MPI, MPICH or Open MPI"),
    "slurm": ("paceline.schedulers.slurm", "srun inside a Slurm allocation"),
    "docker": ("paceline.schedulers.docker", "Docker containers, over SSH"),
    "podman": ("paceline.schedulers.podman", "Podman containers, over SSH"),
    "apptainer": ("paceline.schedulers.apptainer", "Apptainer containers, over SSH"),
}


def transport(name: str, options: Options) -> Transport:
    """The transport called ``name``. SettingError when there is none."""
    if name not in WAYS:
        raise SettingError(f"there is no way `{name}` to start nodes", found=", ".join(WAYS))
    module = importlib.import_module(WAYS[name][0])
    made: Transport = module.transport(options)
    return made


__all__ = ["WAYS", "ContainerOptions", "Options", "transport"]
