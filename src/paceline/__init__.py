"""Paceline: a PyTorch training job, on all the machines you have.

Public are the names below and, inside a job, :mod:`paceline.train`. Each is imported when it is
first used: the command line stays light, and nothing here needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api import Prepared, execute, prepare
    from paceline.hosts import read_hosts
    from paceline.launch.summary import RunOutcome
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

__version__ = "0.1.0"

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
    "Result",
    "RunOutcome",
    "SettingError",
    "__version__",
    "execute",
    "prepare",
    "read_hosts",
]

_HOMES = {
    "Cluster": "paceline.spec.hosts",
    "Failure": "paceline.spec.failure",
    "Host": "paceline.spec.hosts",
    "Plan": "paceline.spec.plan",
    "Prepared": "paceline.api",
    "Result": "paceline.spec.failure",
    "RunOutcome": "paceline.launch.summary",
    "execute": "paceline.api",
    "prepare": "paceline.api",
    "read_hosts": "paceline.hosts",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "paceline.spec.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
