"""The ``[hosts.NAME]`` tables of paceline.toml: hosts, or overrides of other descriptions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from paceline.hosts.address import (
    HOST_FORM,
    canonical_address,
    check_address,
    check_user,
    parse_integer,
)
from paceline.hosts.dialect import UnreadableError
from paceline.hosts.lines import MAX_SLOTS
from paceline.spec import jobenv
from paceline.spec.errors import HostsError
from paceline.spec.formatting import closest_match, suggest
from paceline.spec.hosts import Cluster, Host
from paceline.spec.settings import TOML_NAME

FIELDS = {
    "address": "address",
    "user": "user",
    "port": "port",
    "key": "identity_file",
    "slots": "slots",
    "interface": "interface",
    "job_address": "job_address",
    "python": "python",
    "workdir": "workdir",
    "env": "env",
}
"""Key of a table → field of Host."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_VALUES = {"port": 65535, "slots": MAX_SLOTS}


class TableError(ValueError):
    """Raised for one key of one table; the caller adds file and line.

    Attributes:
        host: Name of the table.
        key: Key in the table; empty for the table itself.
        expected: Valid input.
    """

    def __init__(self, host: str, key: str, expected: str) -> None:
        super().__init__(expected)
        self.host, self.key, self.expected = host, key, expected


def host_tables(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the tables by host name; none if the document has none. Raises TableError."""
    hosts = document.get("hosts", {})
    if not isinstance(hosts, Mapping):  # `hosts = "hostfile"` names a source
        return {}
    for name, table in hosts.items():
        _check_table(name, table)
    return dict(hosts)


def with_table(host: Host, table: Mapping[str, Any]) -> Host:
    """Returns the host with the table's values over its own. Raises TableError."""
    values: dict[str, Any] = {FIELDS[k]: _value(host.name, k, v) for k, v in table.items()}
    if "slots" in values:
        values["slots_yield"] = False
    return replace(host, **values)


def host_from_table(name: str, table: Mapping[str, Any]) -> Host:
    """Returns the host that a table describes. Raises TableError."""
    host = with_table(Host(name), table)
    try:
        check_address(host.address)
    except UnreadableError as problem:
        raise TableError(name, "", problem.expected) from None
    return host


def _check_table(name: str, table: Any) -> None:
    if not isinstance(table, Mapping):
        raise TableError(name, "", f'a table: `[hosts."{name}"]`')
    for key, value in table.items():
        if key in FIELDS:
            _value(name, key, value)
        elif isinstance(value, Mapping):
            dotted_name = _dotted_name(f"{name}.{key}", value)
            raise TableError(name, "", f'quotes around a name with dots: `[hosts."{dotted_name}"]`')
        else:
            raise TableError(name, key, suggest(key, FIELDS))


def _dotted_name(name: str, table: Mapping[str, Any]) -> str:
    """Returns the dotted name that TOML read as nested tables, because it had no quotes."""
    inner = [(key, value) for key, value in table.items() if isinstance(value, Mapping)]
    return _dotted_name(f"{name}.{inner[0][0]}", inner[0][1]) if inner else name


def _value(name: str, key: str, value: Any) -> str | int | dict[str, str]:
    if key == "env":
        return _variables(name, value)
    try:
        return _number(key, value) if key in _MAX_VALUES else _text(key, value)
    except UnreadableError as problem:
        raise TableError(name, key, problem.expected) from None


def _variables(host: str, table: Any) -> dict[str, str]:
    """Reads ``[hosts.NAME.env]``: names of variables with texts or numbers."""
    if not isinstance(table, Mapping):
        raise TableError(host, "env", f'a table: `[hosts."{host}".env]`')
    variables = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            dotted_name = _dotted_name(f"{host}.env.{name}", value)
            raise TableError(host, "", f'quotes around a name with dots: `[hosts."{dotted_name}"]`')
        if not _VARIABLE.fullmatch(name):
            raise TableError(host, name, "the name of a variable: letters, digits and _")
        if jobenv.is_reserved(name):
            raise TableError(host, name, "a variable that does not say a rank's place")
        is_valid = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        if not is_valid or "\0" in str(value):
            raise TableError(host, name, f"text in quotes, or a number, for {name}")
        variables[name] = str(value)
    return variables


def _number(key: str, value: Any) -> int:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else ""
    return parse_integer(text, f"{key}", _MAX_VALUES[key])


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value or "\n" in value:
        raise UnreadableError(f"text in quotes for {key}")
    if key in ("python", "workdir") and not value.startswith("/"):
        raise UnreadableError(f"an absolute path for {key}, such as `/home/me/venv/bin/python`")
    if key in ("address", "job_address"):
        return _address(key, value)
    if key == "user":
        return check_user(value)
    return value


def _address(key: str, value: str) -> str:
    try:
        return check_address(value)
    except UnreadableError:
        raise UnreadableError(f"{HOST_FORM} for {key}") from None


# --- laid over any description


def apply_overrides(cluster: Cluster, toml: Mapping[str, Any]) -> Cluster:
    """Returns the cluster with the values of each ``[hosts.NAME]`` table over its host's own.

    A table belongs to the host of that name, else of that address. Tables of hosts that are not in
    the cluster change nothing; a note reports those that look like misspellings. Raises HostsError
    if a table has an unknown key or an unusable value.
    """
    try:
        tables = host_tables(toml)
        hosts = tuple(_overridden(host, tables) for host in cluster.hosts)
    except TableError as problem:
        table = f"[hosts.{problem.host}]"
        raise HostsError(
            f"{TOML_NAME}, {table}: cannot be read",
            found=problem.key or table,
            remedy=f"expected {problem.expected}",
        ) from None
    notes = (*cluster.notes, *_misspelling_notes(cluster, tables))
    return replace(cluster, hosts=hosts, notes=notes)


def _overridden(host: Host, tables: Mapping[str, Mapping[str, Any]]) -> Host:
    table = tables.get(host.name)
    if table is None:
        by_address = {canonical_address(name): table for name, table in tables.items()}
        table = by_address.get(canonical_address(host.address), {})
    return with_table(host, table)


def _misspelling_notes(cluster: Cluster, tables: Mapping[str, Any]) -> list[str]:
    texts = [text for host in cluster.hosts for text in (host.name, host.address)]
    cluster_names = set(map(canonical_address, texts))
    unknown_names = [name for name in tables if canonical_address(name) not in cluster_names]
    hosts_without_table = [host.name for host in cluster.hosts if host.name not in tables]
    suggestions = {name: _intended_host(name, hosts_without_table) for name in unknown_names}
    return [
        f"[hosts.{name}] in {TOML_NAME} belongs to no host here; is `{guess}` meant?"
        for name, guess in suggestions.items()
        if guess
    ]


def _intended_host(name: str, candidates: Collection[str]) -> str:
    """Returns the host whose name is misspelt; none if only the numbers differ (n1, n2)."""
    digits = str.maketrans("", "", "0123456789")
    if any(name.translate(digits) == candidate.translate(digits) for candidate in candidates):
        return ""
    return closest_match(name, candidates, cutoff=0.8)
