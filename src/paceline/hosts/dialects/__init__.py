"""The dialects by name, imported on first use; writes hosts in a dialect."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from paceline.hosts.dialect import Dialect
from paceline.spec.errors import SettingError
from paceline.spec.formatting import suggest
from paceline.spec.hosts import Cluster, Host

_PACKAGE = "paceline.hosts.dialects"

# Module, or module and constant. Order matters: the first dialect that detects a text reads it, and
# "auto" takes the first environment that is detected (the scheduler before what runs inside it).
_MODULES = {
    "toml": "toml_tables",
    "inventory": "inventory",
    "accelerate": "accelerate",
    "ssh-config": "ssh_config",
    "tlt": "line_files:TLT",
    "slots": "line_files:SLOTS",
    "slurm": "slurm",
    "list": "line_files:LIST",
    "colon": "line_files:COLON",
    "port": "line_files:PORT",
    "pbs": "pbs",
    "plain": "line_files:PLAIN",
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
    "ansible": "inventory",
    "json": "inventory",
    "yaml": "inventory",
}

ENVIRONMENTS = ("slurm", "pbs", "kubernetes", "torchrun", "mpi")
"""Dialects that read variables, in the order in which ``auto`` tries them."""

ALLOCATIONS = ("slurm", "pbs")
"""Dialects of batch systems; a run on this machine alone prints a note inside their jobs."""

COMMAND_LINE_DIALECTS = ("inventory", "slurm", "list")
"""Dialects of hosts typed on the command line; the last one is the default."""


class _Dialects(Mapping[str, Dialect]):
    def __getitem__(self, name: str) -> Dialect:
        module, _, constant = _MODULES[name].partition(":")
        imported = importlib.import_module(f"{_PACKAGE}.{module}")
        dialect = getattr(imported, constant or "DIALECT")
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
    """Returns the dialect's own name for a name or an alias; unknown names stay."""
    return ALIASES.get(name, name)


# --- a cluster in another dialect


# never lost in a way that matters to say
_UNREPORTED_FIELDS = frozenset({"name", "address", "local", "slots_yield", "gpus"})


def write_hosts(cluster: Cluster, dialect: str) -> str:
    """Returns the cluster as a description in the dialect, ending in a newline.

    Raises SettingError if there is no such dialect, or it cannot be written.
    """
    return _writable(dialect)[1](cluster)


def lost_fields(cluster: Cluster, dialect: str) -> list[str]:
    """Returns what the dialect cannot express, one text for each field: ``port of n1, n2``."""
    target = _writable(dialect)[0]
    written = (target.written_fields or target.preserved_fields) | _UNREPORTED_FIELDS
    names = [f.name for f in fields(Host) if f.name not in written]
    lost = [_lost_field_text(cluster, name) for name in names if _hosts_with(cluster, name)]
    omits_hosts = len(cluster.hosts) > 1 and not target.is_complete
    return ["the hosts after the first", *lost] if omits_hosts else lost


def _writable(name: str) -> tuple[Dialect, Callable[[Cluster], str]]:
    dialect = DIALECTS.get(canonical_name(name))
    if dialect is None or dialect.write is None:
        raise SettingError(
            f"hosts cannot be written as `{name}`",
            found="no such dialect" if dialect is None else "it is a set of variables, not a text",
            remedy=suggest(name, [name for name, d in DIALECTS.items() if d.write]),
        )
    return dialect, dialect.write


def _hosts_with(cluster: Cluster, field: str) -> list[str]:
    return [host.name for host in cluster.hosts if getattr(host, field) not in (None, {})]


def _lost_field_text(cluster: Cluster, field: str) -> str:
    names = _hosts_with(cluster, field)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{field} of {', '.join(names[:3])}{more}"
