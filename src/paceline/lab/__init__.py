"""A virtual cluster on one machine: real kernel network, real sshd, faults on demand.

::

    with Lab(LabOptions(hosts=2, debian_hosts=True)) as lab:
        lab.exec("n1", ["ssh", "n2", "hostname"])

Everything lives in namespaces that one process owns. The machine's own network is not changed,
and when that process ends, for whatever reason, the kernel removes everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.lab.lab import Lab
    from paceline.lab.plan import LabOptions

__all__ = ["Lab", "LabOptions"]

_MODULES = {"Lab": "paceline.lab.lab", "LabOptions": "paceline.lab.plan"}


def __getattr__(name: str) -> Any:
    # imported on demand, because the package's small programs start at every connection
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
