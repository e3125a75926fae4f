"""Cuts a log that several ranks wrote into one log a rank, by the labels of known launchers.

Pure. Unknown labels are left in place: rules look for words anywhere in a line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.explain.evidence import Log, lines_of
from paceline.spec.failure import Failure

# Labels that cannot be mistaken for text.
_SURE = tuple(
    re.compile(pattern)
    for pattern in (
        r"^\[(?P<host>[A-Za-z0-9][\w.-]*)/(?P<rank>\d{1,9})\] ?",  # paceline
        r"^\[1,(?P<rank>\d{1,9})\]<(?:stdout|stderr|stddiag)>: ?",  # mpirun --tag-output
        r"^\[rank(?P<rank>\d{1,9})\]:?(?:\[[^\]]*\])? ?",  # torch
        r"^\[default(?P<rank>\d{1,9})\]: ?",  # torchrun --tee
    )
)
# Labels that may be text: believed when most lines have one.
_LIKELY = tuple(
    re.compile(pattern)
    for pattern in (
        r"^(?P<host>[A-Za-z][\w-]*(?:\.[\w-]+)*): ",  # pdsh, and with it DeepSpeed
        r"^ *(?P<rank>\d{1,9}): ",  # srun -l
        r"^\[(?P<rank>\d{1,9})\] ",  # mpiexec -l
    )
)
_MOST = 0.6
_ROOT = "Root Cause (first observed failure):"
_ROOT_LINES = 12  # of the summary below it
_FIELD = re.compile(
    r"\b(?:(?P<host>host) {0,12}: (?P<name>\S+)|(?P<key>rank|exitcode) {0,12}: (?P<n>-?\d{1,9})\b)"
)
_SUMMARY = re.compile(r"^(?:[EW]\d{4} [\d:.]+ +\d+ \S+\] ?)")


def split(text: str) -> list[Log]:
    """One log a rank, then what bears no label; ranks in order."""
    lines = lines_of(text)
    labels = [*_SURE, *_believed(lines)]
    found: dict[tuple[str, int | None], list[str]] = {}
    for line in lines:
        who, rest = _label(line, labels)
        found.setdefault(who, []).append(rest)
    ranked = sorted(found, key=lambda who: (who[1] is None, who[1] or 0, who[0]))
    return [Log(host, rank, tuple(found[host, rank])) for host, rank in ranked]


def _believed(lines: Sequence[str]) -> list[re.Pattern[str]]:
    written = [line for line in lines if line.strip()]
    return [
        pattern
        for pattern in _LIKELY
        if len(written) >= 3
        and sum(bool(pattern.match(line)) for line in written) >= _MOST * len(written)
    ]


def _label(line: str, labels: Sequence[re.Pattern[str]]) -> tuple[tuple[str, int | None], str]:
    host, rank = "", None
    for known in (labels, _SURE):  # a launcher's label, and torch's behind it
        for label in known:
            if match := label.match(line):
                groups = match.groupdict()
                host = groups.get("host") or host
                rank = int(groups["rank"]) if groups.get("rank") else rank
                line = line[match.end() :]
                break
    return (host, rank), line


def root_cause(text: str) -> Failure | None:
    """Who failed first by torchrun's own summary, when the text has one."""
    lines = lines_of(text)
    start = next((at for at, line in enumerate(lines) if _ROOT in line), len(lines))
    said: dict[str, str] = {}
    for line in lines[start + 1 : start + 1 + _ROOT_LINES]:
        if found := _FIELD.search(_SUMMARY.sub("", line)):
            said.setdefault(found["host"] or found["key"], found["name"] or found["n"])
    if not said.keys() >= {"host", "rank", "exitcode"} or int(said["rank"]) < 0:
        return None
    code = int(said["exitcode"])
    host, rank, headline = said["host"], int(said["rank"]), f"exit status {code}"
    if code < 0:
        return Failure("signal", host, rank, signal=-code, headline=headline)
    return Failure("exit", host, rank, code=code, headline=headline)
