"""The dialects by name, each module imported when it is first asked for; writing in one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from paceline.hosts.dialect import Dialect
from paceline.spec.errors import SettingError
from paceline.spec.helptext import did_you_mean
from paceline.spec.hosts import Cluster, Host

_PACKAGE = "paceline.hosts.dialects"

# Module, or module and constant. Order matters: a text is read by the first dialect that recognises
# it, and "auto" takes the first environment that is there (the scheduler before what runs inside).
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
"""Of these, the batch systems': who means this machine alone is told of their hosts."""

TYPED = ("inventory", "slurm", "list")
"""Dialects in which hosts may be typed on the command line; the last for whatever is left."""


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
    """The dialect's own name for a name or an alias; unknown names stay as they are."""
    return ALIASES.get(name, name)


# --- a cluster in another dialect


_IMPLIED = frozenset(
    {"name", "address", "local", "slots_yield", "gpus"}
)  # never lost in a way that matters to say


def write_hosts(cluster: Cluster, dialect: str) -> str:
    """The cluster as a description in the dialect, ending in a newline.

    Raises:
        SettingError: There is no such dialect, or it cannot be written.
    """
    return _writable(dialect)[1](cluster)


def lost_fields(cluster: Cluster, dialect: str) -> list[str]:
    """What the dialect cannot say, one sentence a field: ``port of n1, n2``."""
    chosen = _writable(dialect)[0]
    names = [f.name for f in fields(Host) if f.name not in chosen.says | _IMPLIED]
    lost = [_sentence(cluster, name) for name in names if _holders(cluster, name)]
    others = len(cluster.hosts) > 1 and not chosen.reads_back
    return ["the hosts after the first", *lost] if others else lost


def writable_names() -> list[str]:
    """The dialects that can be written."""
    return [name for name, dialect in DIALECTS.items() if dialect.write]


def _writable(name: str) -> tuple[Dialect, Callable[[Cluster], str]]:
    dialect = DIALECTS.get(canonical_name(name))
    if dialect is None or dialect.write is None:
        raise SettingError(
            f"hosts cannot be written as `{name}`",
            found="no such dialect" if dialect is None else "it is a set of variables, not a text",
            remedy=did_you_mean(name, writable_names()),
        )
    return dialect, dialect.write


def _holders(cluster: Cluster, field: str) -> list[str]:
    return [host.name for host in cluster.hosts if getattr(host, field) not in (None, {})]


def _sentence(cluster: Cluster, field: str) -> str:
    names = _holders(cluster, field)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{field} of {', '.join(names[:3])}{more}"
