"""Paceline: a PyTorch training job, on all the machines you have.

Public are the names below and, inside a job, :mod:`paceline.train`. Each is imported when it is
first used: the command line stays light, and nothing here needs torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline.spec.version import __version__

if TYPE_CHECKING:
    from paceline.api import Prepared, execute, launch, prepare
    from paceline.hosts import read_hosts
    from paceline.launch.call import RankError, Results
    from paceline.launch.results.run_outcome import RunOutcome
    from paceline.spec.errors import (
        ConnectError,
        DataError,
        HostsError,
        JobError,
        LabError,
        NodeError,
        PacelineError,
        SettingError,
    )
    from paceline.spec.failure import Failure, Result
    from paceline.spec.hosts import Cluster, Host
    from paceline.spec.plan import Plan

__all__ = [
    "Cluster",
    "ConnectError",
    "DataError",
    "Failure",
    "Host",
    "HostsError",
    "JobError",
    "LabError",
    "NodeError",
    "PacelineError",
    "Plan",
    "Prepared",
    "RankError",
    "Result",
    "Results",
    "RunOutcome",
    "SettingError",
    "__version__",
    "execute",
    "launch",
    "prepare",
    "read_hosts",
]

_MODULES = {  # those of errors are not listed
    "paceline.api": ("Prepared", "execute", "launch", "prepare"),
    "paceline.hosts": ("read_hosts",),
    "paceline.launch.call": ("RankError", "Results"),
    "paceline.launch.results.run_outcome": ("RunOutcome",),
    "paceline.spec.failure": ("Failure", "Result"),
    "paceline.spec.hosts": ("Cluster", "Host"),
    "paceline.spec.plan": ("Plan",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    modules = (module for module, names in _MODULES.items() if name in names)
    return getattr(importlib.import_module(next(modules, "paceline.spec.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package: ``paceline.launch`` is the function, also once the folder of that name is in.

    An import writes the folder's module over an attribute of its name. Inside, everything is
    imported ``from paceline.launch``, which does not look at the attribute.
    """

    @property
    def launch(self) -> Any:
        return importlib.import_module("paceline.api").launch

    @launch.setter
    def launch(self, module: ModuleType) -> None:
        """Ignores the submodule of that name, which its import assigns here."""

    def __reduce__(self) -> Any:
        """Pickles the package by its name, like a module, in functions that use it."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
