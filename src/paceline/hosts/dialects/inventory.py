"""Lists of hosts in JSON, YAML or CSV, and Ansible's inventories (INI, YAML, JSON).

All are read as groups that hold hosts and other groups. A host's keys are those of the line
grammar. All hosts are taken, in the order of the file, each once.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.hosts.address import canonical_address
from paceline.hosts.dialect import Dialect, Parsed, Reading, UnreadableError, line_error, printable
from paceline.hosts.dialects.accelerate import MARK as ACCELERATE
from paceline.hosts.dialects.accelerate import load_yaml
from paceline.hosts.lines import KEYS, Mention, hosts_of, read_line, split_lines, strip_comment
from paceline.hosts.nodelist import MAX_HOSTS
from paceline.spec.errors import HostsError

_INI_HEADER = re.compile(r"\[([A-Za-z_][\w.-]*)(?::(vars|children))?\]")
_INI_RANGE = re.compile(r"\[([0-9]+):([0-9]+)\]")
_JSON = re.compile(r"\s*(\{|\[\s*[\"{\]])")
_YAML = re.compile(r"^(hosts|nodes|machines|workers|servers|all)\s*:\s*(\[.*)?$|^-\s+\S", re.M)
_ENDINGS = (".json", ".yaml", ".yml")
_NAMES = ("name", "host", "hostname", "address", "ip", "public_ip", "private_ip")
_LISTS = ("hosts", "nodes", "machines", "workers", "servers", "instances")
_DEPTH = 16
_FORM = '`["n1", "n2"]`, `[{"host": "n1", "slots": 2}]` or `{"hosts": […]}`'


@dataclass
class _Group:
    """A group: hosts with their keys, keys for all of them, names of inner groups."""

    hosts: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    children: list[str] = field(default_factory=list)


def detect(reading: Reading) -> bool:
    """Whether the text is a JSON list or object, a YAML list, a table, or an INI inventory."""
    if _JSON.match(reading.text) or _columns(reading.text):
        return True
    if any(_INI_HEADER.fullmatch(strip_comment(line)) for line in split_lines(reading.text)):
        return True
    is_list = reading.label.endswith(_ENDINGS) or bool(_YAML.search(reading.text))
    return is_list and bool(reading.text) and not ACCELERATE.search(reading.text)


def parse(reading: Reading) -> Parsed:
    """Returns the hosts of all groups, each once."""
    is_ini = any(_INI_HEADER.fullmatch(strip_comment(line)) for line in split_lines(reading.text))
    if columns := _columns(reading.text):
        groups = {"": _Group([*_entries(reading, _rows(reading.text, columns))])}
    else:
        groups = _ini_groups(reading) if is_ini else _document_groups(reading)
    mentions: dict[tuple[str, int | None], Mention] = {}
    inherited = _Inheritance(reading.label, groups)
    for name in groups:
        for host, keys in groups[name].hosts:
            for mention in _mentions(reading, host, {**inherited.keys(name), **keys}):
                key = (canonical_address(mention.name or mention.address), mention.port)
                mentions.setdefault(key, mention)
        if len(mentions) > MAX_HOSTS:
            raise HostsError(f"{reading.label}: more than {MAX_HOSTS} hosts")
    parsed = hosts_of(reading, list(mentions.values()))
    with_hosts = [name for name in groups if groups[name].hosts and name]
    if len(with_hosts) < 2:
        return parsed
    note = f"hosts of all groups are taken: {', '.join(with_hosts)}"
    return Parsed(parsed.hosts, (*parsed.notes, note))


def _mentions(reading: Reading, host: str, keys: Mapping[str, str]) -> list[Mention]:
    """Reads a host as a line; in INI files it may already have keys."""
    line_keys = {key: value if key in KEYS else "…" for key, value in keys.items()}
    line = " ".join([host, *(f"{key}={value}" for key, value in line_keys.items())])
    try:
        if any(re.search(r"\s", value) for key, value in keys.items() if key in KEYS):
            raise UnreadableError("values without blanks")
        body = strip_comment(line)
        return [mention for mention in read_line(body) if mention.address] if body else []
    except UnreadableError as problem:
        raise HostsError(
            f"{reading.label}: a host cannot be read",
            found=printable(line),
            remedy=f"expected {problem.expected}",
        ) from None


class _Inheritance:
    """The keys that groups have from the groups that contain them."""

    def __init__(self, label: str, groups: Mapping[str, _Group]) -> None:
        self._label, self._groups = label, groups
        self._known: dict[str, dict[str, str]] = {}
        self._parents: dict[str, list[str]] = {}
        for name, group in groups.items():
            for child in dict.fromkeys(group.children):
                self._parents.setdefault(child, []).append(name)

    def keys(self, name: str, depth: int = 0) -> dict[str, str]:
        """Returns keys of the group and of the groups that contain it; the inner group wins."""
        if name not in self._known:
            if depth > _DEPTH:
                raise HostsError(f"{self._label}: too many groups within groups, at [{name}]")
            self._known[name] = {}  # for a group that contains itself
            keys = dict(self._groups["all"].keys) if "all" in self._groups else {}
            for parent in self._parents.get(name, ()):
                keys.update(self.keys(parent, depth + 1))
            self._known[name] = {**keys, **self._groups[name].keys}
        return self._known[name]


# --- CSV


def _columns(text: str) -> list[str]:
    """Returns the column names in the first line, if it has only those; else none."""
    header = next((line for line in split_lines(text) if strip_comment(line)), "")
    names = [name.strip().strip('"').lower() for name in re.split(r"[,;\t]", header)]
    column_names = {*_NAMES, *KEYS}
    return names if len(names) > 1 and names[0] in _NAMES and set(names) <= column_names else []


def _rows(text: str, columns: list[str]) -> list[dict[str, str]]:
    lines = [line for line in split_lines(text) if strip_comment(line)]
    delimiter = next(char for char in ",;\t" if char in lines[0])
    rows = csv.reader(lines[1:], delimiter=delimiter, skipinitialspace=True)
    return [
        {key: value.strip() for key, value in zip(columns, row, strict=False) if value.strip()}
        for row in rows
    ]


# --- INI


def _ini_groups(reading: Reading) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    name, kind = "", ""
    for number, line in enumerate(split_lines(reading.text), start=1):
        body = strip_comment(line)
        header = _INI_HEADER.fullmatch(body)
        if header:
            name, kind = header[1], header[2] or ""
            groups.setdefault(name, _Group())
        elif body and kind == "children":
            groups[name].children.append(body)
        elif body and kind == "vars":
            key, equals, value = body.partition("=")
            if not equals:
                raise line_error(reading.label, number, line, "`key=value`")
            if key.strip().startswith("ansible_"):
                groups[name].keys[key.strip()] = value.strip()
        elif body:
            host, *options = re.sub(r"\s*=\s*", "=", body).split()
            if not all("=" in option for option in options):
                raise line_error(reading.label, number, line, "a host and `key=value` pairs")
            keys = dict(option.split("=", 1) for option in options)
            groups.setdefault(name, _Group()).hosts.append((_INI_RANGE.sub(r"[\1-\2]", host), keys))
    return groups


# --- JSON and YAML


def _document_groups(reading: Reading) -> dict[str, _Group]:
    # JSON is YAML but for tabs
    document = load_yaml(reading, reading.text.replace("\t", "  "), f"JSON or YAML: {_FORM}")
    groups: dict[str, _Group] = {}
    _add_group(reading, groups, "", document, 0)
    if not any(group.hosts for group in groups.values()):
        raise line_error(reading.label, 1, split_lines(reading.text.strip())[0], _FORM)
    return groups


def _add_group(reading: Reading, groups: dict[str, _Group], name: str, node: Any,
               depth: int) -> None:  # fmt: skip
    """Adds the group at one node of the document, and the groups within."""
    if depth > _DEPTH:
        raise HostsError(
            f"{reading.label}: too many groups within groups", remedy=f"expected {_FORM}"
        )
    group = groups.setdefault(name, _Group())
    if isinstance(node, list) or _is_table(node):
        group.hosts += _entries(reading, node)
        return
    if not isinstance(node, Mapping):
        return
    meta = node.get("_meta", {})
    variables = meta.get("hostvars", {}) if isinstance(meta, Mapping) else {}
    group.keys.update(_keys(node.get("vars")))
    for key, value in node.items():
        if key in _LISTS:
            group.hosts += _entries(reading, value)
        elif key == "children" and isinstance(value, list):
            group.children += [str(child) for child in value]
        elif key in ("children", "all") and isinstance(value, Mapping):
            children = value if key == "children" else {key: value}
            for child, content in children.items():
                group.children.append(str(child))
                _add_group(reading, groups, str(child), content, depth + 1)
        elif isinstance(value, Mapping) and {"hosts", "children"} & set(value):
            _add_group(reading, groups, str(key), value, depth + 1)
    if isinstance(variables, Mapping):
        for member in groups.values():
            member.hosts = [
                (host, {**keys, **_keys(variables.get(host))}) for host, keys in member.hosts
            ]


def _is_table(node: Any) -> bool:
    """Whether the node maps names to numbers of processes or keys: ``{"n1": 2}``."""
    group_keys = {*_LISTS, "all", "children", "vars", "num_machines"}
    if not node or not isinstance(node, Mapping) or set(node) & group_keys:
        return False
    return all(
        set(value) <= set(KEYS) if isinstance(value, Mapping) else type(value) is int
        for value in node.values()
    )


def _entries(reading: Reading, node: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Returns the hosts of a list, or of an object whose keys they are."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            is_count = isinstance(value, int) and not isinstance(value, bool)
            yield str(name), {"slots": str(value)} if is_count else _keys(value)
        return
    for entry in node if isinstance(node, list) else [node]:
        if isinstance(entry, (str, int)):
            yield str(entry), {}
            continue
        name_keys = [key for key in _NAMES if isinstance(entry, Mapping) and entry.get(key)]
        if not name_keys:
            raise HostsError(
                f"{reading.label}: a host cannot be read",
                found=printable(str(entry)),
                remedy=f"expected {_FORM}",
            )
        keys = {str(key): str(value) for key, value in entry.items() if key not in _NAMES}
        addresses = [entry[key] for key in name_keys[1:] if "ip" in key or key == "address"]
        if addresses:
            keys["address"] = str(addresses[0])
        yield str(entry[name_keys[0]]), keys


def _keys(node: Any) -> dict[str, str]:
    """Returns Ansible's connection keys of a host or a group; others may be anything."""
    pairs = node.items() if isinstance(node, Mapping) else ()
    return {
        str(key): str(value)
        for key, value in pairs
        if str(key).startswith("ansible_") or key in ("slots", "user", "port", "address")
    }


DIALECT = Dialect(
    name="inventory", title="JSON, YAML or Ansible inventory", detect=detect, parse=parse
)
