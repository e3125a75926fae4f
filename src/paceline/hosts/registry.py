"""The dialects by name, each imported when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from paceline.hosts.dialect import Dialect

_PACKAGE = "paceline.hosts.dialects"

# Order matters: a text is read by the first dialect that recognises it, and "auto" takes the
# first environment that is there (the scheduler before what runs inside it).
_MODULES = {
    "toml": "toml_tables",
    "accelerate": "accelerate",
    "ssh-config": "ssh_config",
    "tlt": "tlt",
    "slots": "slots",
    "slurm": "slurm",
    "list": "comma_list",
    "colon": "colon",
    "port": "port",
    "pbs": "pbs",
    "plain": "plain",
    "kubernetes": "kubernetes",
    "torchrun": "torchrun",
    "mpi": "mpi",
}

ALIASES = {
    "openmpi": "slots",
    "deepspeed": "slots",
    "mpich": "colon",
    "intel": "colon",
    "intelmpi": "colon",
    "paceline": "toml",
    "k8s": "kubernetes",
    "ssh": "ssh-config",
}

ENVIRONMENTS = ("slurm", "pbs", "kubernetes", "torchrun", "mpi")
"""Dialects that read variables, in the order in which ``auto`` tries them."""


class _Dialects(Mapping[str, Dialect]):
    def __getitem__(self, name: str) -> Dialect:
        module = importlib.import_module(f"{_PACKAGE}.{_MODULES[name]}")
        dialect = module.DIALECT
        assert isinstance(dialect, Dialect)
        return dialect

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)

    def __contains__(self, name: object) -> bool:
        return name in _MODULES


DIALECTS: Mapping[str, Dialect] = _Dialects()
"""Name → dialect."""


def canonical_name(name: str) -> str:
    """The dialect's own name for a name or an alias; unknown names stay as they are."""
    return ALIASES.get(name, name)
