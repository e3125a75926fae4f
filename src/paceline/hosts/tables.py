"""The ``[hosts.NAME]`` tables of paceline.toml: their keys, as hosts, and laid over other hosts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from paceline.hosts.address import A_HOST, canonical, check_address, check_user, whole_number
from paceline.hosts.dialect import UnreadableError
from paceline.hosts.lines import MOST_SLOTS
from paceline.spec import jobenv
from paceline.spec.errors import HostsError
from paceline.spec.helptext import did_you_mean, nearest
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
_MOST = {"port": 65535, "slots": MOST_SLOTS}


class BadTableError(ValueError):
    """Raised for one key of one table; the caller adds file and line.

    Attributes:
        host: The table's name.
        key: The key in it, empty for the table itself.
        expected: What would have been right.
    """

    def __init__(self, host: str, key: str, expected: str) -> None:
        super().__init__(expected)
        self.host, self.key, self.expected = host, key, expected


def host_tables(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Host name → its table. Empty when the document has none. Raises BadTableError."""
    hosts = document.get("hosts", {})
    if not isinstance(hosts, Mapping):  # `hosts = "hostfile"` names a source
        return {}
    for name, table in hosts.items():
        _check_table(name, table)
    return dict(hosts)


def with_table(host: Host, table: Mapping[str, Any]) -> Host:
    """The host with the table's values over its own. Raises BadTableError."""
    values: dict[str, Any] = {FIELDS[key]: _value(host.name, key, table[key]) for key in table}
    if "slots" in values:
        values["slots_yield"] = False
    return replace(host, **values)


def host_from_table(name: str, table: Mapping[str, Any]) -> Host:
    """The host that a table alone describes. Raises BadTableError."""
    host = with_table(Host(name), table)
    try:
        check_address(host.address)
    except UnreadableError as problem:
        raise BadTableError(name, "", problem.expected) from None
    return host


def _check_table(name: str, table: Any) -> None:
    if not isinstance(table, Mapping):
        raise BadTableError(name, "", f'a table: `[hosts."{name}"]`')
    for key, value in table.items():
        if key in FIELDS:
            _value(name, key, value)
        elif isinstance(value, Mapping):
            whole = _dotted_name(f"{name}.{key}", value)
            raise BadTableError(name, "", f'quotes around a name with dots: `[hosts."{whole}"]`')
        else:
            raise BadTableError(name, key, did_you_mean(key, FIELDS))


def _dotted_name(name: str, table: Mapping[str, Any]) -> str:
    """The name that TOML took for nested tables because it stood without quotes."""
    inner = [(key, value) for key, value in table.items() if isinstance(value, Mapping)]
    return _dotted_name(f"{name}.{inner[0][0]}", inner[0][1]) if inner else name


def _value(name: str, key: str, value: Any) -> str | int | dict[str, str]:
    if key == "env":
        return _variables(name, value)
    try:
        return _number(key, value) if key in _MOST else _text(key, value)
    except UnreadableError as problem:
        raise BadTableError(name, key, problem.expected) from None


def _variables(host: str, table: Any) -> dict[str, str]:
    """``[hosts.NAME.env]``: names of variables, and texts or numbers."""
    if not isinstance(table, Mapping):
        raise BadTableError(host, "env", f'a table: `[hosts."{host}".env]`')
    found = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            whole = _dotted_name(f"{host}.env.{name}", value)
            raise BadTableError(host, "", f'quotes around a name with dots: `[hosts."{whole}"]`')
        if not _VARIABLE.fullmatch(name):
            raise BadTableError(host, name, "the name of a variable: letters, digits and _")
        if jobenv.is_ours(name):
            raise BadTableError(host, name, "a variable that does not say a rank's place")
        if (
            not isinstance(value, (str, int, float))
            or isinstance(value, bool)
            or "\0" in str(value)
        ):
            raise BadTableError(host, name, f"text in quotes, or a number, for {name}")
        found[name] = str(value)
    return found


def _number(key: str, value: Any) -> int:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else ""
    return whole_number(text, f"{key}", _MOST[key])


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
        raise UnreadableError(f"{A_HOST} for {key}") from None


# --- laid over any description


def apply_overrides(cluster: Cluster, toml: Mapping[str, Any]) -> Cluster:
    """The cluster with the values of each ``[hosts.NAME]`` table over its host's own.

    A table belongs to the host of that name, else of that address. Tables for hosts that are
    not in the cluster change nothing; where one looks like a slip of the pen a note says so.

    Args:
        cluster: As described elsewhere.
        toml: The whole document of paceline.toml.

    Raises:
        HostsError: A table has an unknown key or an unusable value.
    """
    try:
        tables = host_tables(toml)
        hosts = tuple(_overridden(host, tables) for host in cluster.hosts)
    except BadTableError as problem:
        raise _error(problem) from None
    return replace(cluster, hosts=hosts, notes=(*cluster.notes, *_slips(cluster, tables)))


def _overridden(host: Host, tables: Mapping[str, Mapping[str, Any]]) -> Host:
    table = tables.get(host.name)
    if table is None:
        by_address = {canonical(name): table for name, table in tables.items()}
        table = by_address.get(canonical(host.address), {})
    return with_table(host, table)


def _slips(cluster: Cluster, tables: Mapping[str, Any]) -> list[str]:
    known = {canonical(text) for host in cluster.hosts for text in (host.name, host.address)}
    strange = [name for name in tables if canonical(name) not in known]
    open_names = [host.name for host in cluster.hosts if host.name not in tables]
    guesses = {name: _meant(name, open_names) for name in strange}
    return [
        f"[hosts.{name}] in {TOML_NAME} belongs to no host here; is `{guess}` meant?"
        for name, guess in guesses.items()
        if guess
    ]


def _meant(name: str, among: Collection[str]) -> str:
    """The host of which the name is a misspelling; none if it is a neighbour (n1, n2)."""
    digits = str.maketrans("", "", "0123456789")
    if any(name.translate(digits) == other.translate(digits) for other in among):
        return ""
    return nearest(name, among, cutoff=0.8)


def _error(problem: BadTableError) -> HostsError:
    where = f"{TOML_NAME}, [hosts.{problem.host}]"
    found = problem.key or f"[hosts.{problem.host}]"
    return HostsError(
        f"{where}: cannot be read", found=found, remedy=f"expected {problem.expected}"
    )
