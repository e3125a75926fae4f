"""``[hosts.NAME]`` tables of a paceline.toml, the only dialect with all fields of a host."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from paceline.hosts.dialect import Dialect, Parsed, Reading, line_error
from paceline.hosts.lines import split_lines
from paceline.hosts.tables import FIELDS, TableError, host_from_table, host_tables
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Cluster, Host

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE = re.compile(r"^[ \t]*(\[[ \t]*hosts[ \t]*[.\]]|hosts[ \t]*[.=])", re.M)
_MAX_KEY_PARTS = 500  # the parser's memory grows with their square
_POSITION = re.compile(r"at line ([0-9]+)")


def detect(reading: Reading) -> bool:
    """Whether the file ends in ``.toml``, or has a ``[hosts.…]`` header."""
    is_toml = reading.label.endswith(".toml") or bool(_TABLE.search(reading.text))
    return is_toml and bool(reading.text)


def parse(reading: Reading) -> Parsed:
    """Returns the hosts in the order of their tables."""
    document = parse_document(reading.text, reading.label)
    try:
        tables = host_tables(document)
        return Parsed(tuple(host_from_table(name, table) for name, table in tables.items()))
    except TableError as problem:
        raise located(problem, reading.text, reading.label) from None


def write(cluster: Cluster) -> str:
    """Writes a table for each host, with the keys that have a value."""
    return "\n".join(_table(host) for host in cluster.hosts)


def parse_document(text: str, label: str) -> Mapping[str, Any]:
    """Parses TOML without checking its tables. Raises HostsError with the line."""
    joined = re.sub(r"(?<![ \t])[ \t]*\.[ \t]*", ".", text)
    for token in re.finditer(r"[^\s,=#{}\[\]]+", joined):
        if token[0].count(".") > _MAX_KEY_PARTS:
            number = joined.count("\n", 0, token.start()) + 1
            raise line_error(
                label, number, token[0][:80], f"keys of at most {_MAX_KEY_PARTS} parts"
            )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise line_error(label, 1, text[:80], "TOML, not thousands of brackets") from None
    except ValueError as problem:  # also of numbers with thousands of digits
        lines = split_lines(text)
        match = _POSITION.search(str(problem))
        number = min(int(match[1]), len(lines)) if match else len(lines)
        raise line_error(label, number, lines[number - 1], f"TOML ({problem})") from None


def located(problem: TableError, text: str, label: str) -> HostsError:
    """Returns the error with the line of the key or the table."""
    lines = split_lines(text)
    number = _line_number(lines, problem)
    return line_error(label, number, lines[number - 1], problem.expected)


def _line_number(lines: list[str], problem: TableError) -> int:
    """Returns the key's line within its table, else the table's line, else 1."""
    name = re.escape(problem.host)
    header = re.compile(rf"\s*\[\s*hosts\s*\.\s*([\"']?){name}\1\s*[.\]]|\s*([\"']?){name}\2\s*=")
    start = next((n for n, line in enumerate(lines, start=1) if header.match(line)), 1)
    key = re.compile(rf"\s*([\"']?){re.escape(problem.key)}\1\s*=")
    table_lines = enumerate(lines[start:], start=start + 1)
    number = next((n for n, line in table_lines if problem.key and key.match(line)), start)
    return number if problem.key and number > start else _dotted(lines, problem) or start


def _dotted(lines: list[str], problem: TableError) -> int:
    """Returns the line of ``hosts.n1.slots = 2`` or ``n1 = { slots = 2 }``, or 0."""
    patterns = [rf"\b{re.escape(text)}\b" for text in (problem.host, problem.key or problem.host)]
    numbered = enumerate(lines, start=1)
    return next((n for n, line in numbered if all(re.search(p, line) for p in patterns)), 0)


def _table(host: Host) -> str:
    values = {key: getattr(host, field) for key, field in FIELDS.items()}
    if host.address == host.name:
        del values["address"]
    given = {key: value for key, value in values.items() if value not in (None, {})}
    lines = [f"{key} = {_toml(value)}\n" for key, value in given.items()]
    return f"[hosts.{_key(host.name)}]\n" + "".join(lines)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: str | int | Mapping[str, str]) -> str:
    if isinstance(value, Mapping):
        items = ", ".join(f"{_key(name)} = {_toml(item)}" for name, item in value.items())
        return f"{{ {items} }}"
    # JSON's escapes are TOML's too, except that TOML wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


DIALECT = Dialect(
    name="toml",
    title="[hosts.NAME] tables",
    detect=detect,
    parse=parse,
    write=write,
    preserved_fields=frozenset({"name", *FIELDS.values()}),
)
