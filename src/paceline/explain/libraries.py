"""Summarizes the debug output of libraries: version, interface, transport, warnings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from paceline.explain.evidence import Log
from paceline.spec.libraries import classify_line

WIDTH = 180
MAX_WARNINGS = 6
MAX_VALUES = 6
# library, fact, and the line that states it, in the order of the summary
FACTS = tuple(
    (library, fact, re.compile(pattern))
    for library, fact, pattern in (
        ("NCCL", "version", r"(?<!, )NCCL version (\S{1,60})"),
        ("NCCL", "interface", r"NCCL INFO Bootstrap ?: Using (?:\[\d+\])?([^\s<]{1,200})"),
        ("NCCL", "network", r"NCCL INFO Using network (\S.{0,60}?)$"),
        ("NCCL", "network", r"NCCL INFO NET/(?:OFI|Plugin).{0,40}[Ss]elected [Pp]rovider is (\S+)"),
        ("NCCL", "devices", r"NCCL INFO NET/\w{1,20} : Using (?!\[RO\])(.{1,120}?)$"),
        ("NCCL", "transport", r"NCCL INFO Channel \d.{1,90}? via ([A-Z0-9]+(?:/[A-Za-z]+)?)"),
        ("NCCL", "channels", r"NCCL INFO (\d+ coll channels.{0,100}?)(?:,|$)"),
        ("NCCL", "connected", r"NCCL INFO Connected all (rings|trees)"),
        ("NCCL", "communicator", r"NCCL INFO .{0,80}?rank \d+ nranks (\d+) .{0,120}Init COMPLETE"),
        ("torch", "store", r"client socket has connected to \[?(?:::ffff:)?(\S{1,100}) on"),
        ("torch", "NCCL", r"ProcessGroupNCCL.{0,300}NCCL version: ([\w.]+)"),
        ("gloo", "peers", r"gloo/.{0,120}Rank \d+ is connected to (\d+)"),
        ("Intel MPI", "version", r"MPI startup\(\): Intel\(R\) MPI Library, Version (\S+)"),
        ("Intel MPI", "libfabric", r"MPI startup\(\): libfabric version: (\S+)"),
        ("Intel MPI", "provider", r"MPI startup\(\): libfabric provider: (\S+)"),
        ("libfabric", "interface", r"libfabric:.{0,200}Available addr: \S+, iface name: ([^\s,]+)"),
        ("UCX", "version", r"UCX +INFO +[Vv]ersion (\S+)"),
        ("UCX", "transport", r"UCX +INFO .{0,60}ep_cfg\[\d+\]: (.{1,120}?);? *$"),
        ("oneCCL", "version", r"\|CCL_INFO\|.{0,40}library version: (\S+)"),
        ("oneCCL", "launcher", r"\|CCL_INFO\| process launcher: (\w+)"),
        ("oneCCL", "transport", r"\|CCL_INFO\|.{0,60}CCL_ATL_TRANSPORT: (\w+)"),
        ("oneCCL", "provider", r"\|CCL_INFO\|.{0,200}prov(?:ider)?(?:_name)?: ([\w;]+)"),
    )
)  # fmt: skip
_MARKS = {  # one of them is in each line that states a fact
    "NCCL": "NCCL ", "torch": ".cpp:", "gloo": "gloo/", "Intel MPI": "MPI startup", "UCX": "UCX",
    "libfabric": "libfabric:", "oneCCL": "|CCL_INFO|",
}  # fmt: skip
_VARYING = re.compile(r"0x[0-9a-f]+|\d+")  # parts in which two ranks' warnings may differ


def summarize(logs: Sequence[Log]) -> list[str]:
    """The warnings, then a line for each fact with its hosts. Skips lines of other origin."""
    library_lines = [(log, _library_lines(log.lines)) for log in logs]
    warnings = _warnings(library_lines)
    facts: dict[tuple[str, str], dict[str, list[Log]]] = {}
    for log, lines in library_lines:
        for key, value in dict.fromkeys(_facts([line for line, _ in lines])):
            facts.setdefault(key, {}).setdefault(value, []).append(log)
    order = list(dict.fromkeys(fact[:2] for fact in FACTS))
    hosts = {log.host for log, lines in library_lines if lines}
    return warnings + [
        f"{' '.join(key)}: {_join_values(facts[key], len(hosts))}" for key in order if key in facts
    ]


def _library_lines(lines: Sequence[str]) -> list[tuple[str, str]]:
    """The lines that a library wrote, with their classes."""
    return [(line, kind) for line in lines if (kind := classify_line(line))]


def _facts(lines: Sequence[str]) -> Iterator[tuple[tuple[str, str], str]]:
    for line in lines:
        for library, fact, pattern in FACTS:
            if _MARKS[library] in line and (match := pattern.search(line)):
                yield (library, fact), match[1].strip().replace("]:", ":")


def _warnings(library_lines: Sequence[tuple[Log, Sequence[tuple[str, str]]]]) -> list[str]:
    """Each distinct warning once, with the first rank that had it and the number of others."""
    distinct: dict[str, tuple[str, str, int]] = {}
    for log, lines in library_lines:
        for line, kind in lines:
            if kind != "warned":
                continue
            key = _VARYING.sub("#", line)
            label, text, count = distinct.get(key, (log.label, line, 0))
            distinct[key] = (label, text, count + 1)
    messages = [
        f"warning: {label}: {text[:WIDTH]}{f' (and {count - 1} more like it)' if count > 1 else ''}"
        for label, text, count in list(distinct.values())[:MAX_WARNINGS]
    ]
    num_hidden = len(distinct) - len(messages)
    return messages + ([f"warning: … and {num_hidden} other warnings"] if num_hidden > 0 else [])


def _join_values(values: Mapping[str, Sequence[Log]], hosts: int) -> str:
    """``eth0 on n1, ens3 on n2``; a value of all hosts is given without hosts."""
    parts = []
    for value, logs in list(values.items())[:MAX_VALUES]:
        names = list(dict.fromkeys(log.host or log.label for log in logs))
        host_list = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        parts.append(value if len(names) >= hosts else f"{value} on {host_list}")
    num_hidden = len(values) - len(parts)
    return "; ".join(parts) + (f"; and {num_hidden} more" if num_hidden > 0 else "")
