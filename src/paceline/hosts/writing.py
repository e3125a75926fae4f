"""A cluster in another dialect, and what is lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from paceline.hosts.dialect import Dialect
from paceline.hosts.problems import did_you_mean
from paceline.hosts.registry import DIALECTS, canonical_name
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Cluster, Host

_IMPLIED = frozenset(
    {"name", "address", "local", "slots_yield"}
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
    return [host.name for host in cluster.hosts if getattr(host, field) is not None]


def _sentence(cluster: Cluster, field: str) -> str:
    names = _holders(cluster, field)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{field} of {', '.join(names[:3])}{more}"
