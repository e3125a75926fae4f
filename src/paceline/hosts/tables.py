"""The ``[hosts.NAME]`` tables of paceline.toml: their keys, and how they become hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.hosts.address import A_HOST, check_address, check_user, whole_number
from paceline.hosts.dialect import UnreadableError
from paceline.hosts.lines import MOST_SLOTS
from paceline.hosts.problems import did_you_mean
from paceline.spec.hosts import Host

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
}
"""Key of a table → field of Host."""

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


def _value(name: str, key: str, value: Any) -> str | int:
    try:
        return _number(key, value) if key in _MOST else _text(key, value)
    except UnreadableError as problem:
        raise BadTableError(name, key, problem.expected) from None


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
