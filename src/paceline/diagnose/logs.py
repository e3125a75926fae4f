"""Cuts a log that several ranks wrote into one log a rank, by the labels of known launchers.

Pure. Unknown labels are left in place: rules look for words anywhere in a line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.diagnose.evidence import ERASED, First, Log

# Labels that cannot be mistaken for text.
_SURE = tuple(
    re.compile(pattern)
    for pattern in (
        r"^\[(?P<host>[A-Za-z0-9][\w.-]*)/(?P<rank>\d+)\] ?",  # paceline
        r"^\[1,(?P<rank>\d+)\]<(?:stdout|stderr|stddiag)>: ?",  # mpirun --tag-output
        r"^\[rank(?P<rank>\d+)\]:?(?:\[[^\]]*\])? ?",  # torch
        r"^\[default(?P<rank>\d+)\]: ?",  # torchrun --tee
    )
)
# Labels that may be text: believed when most lines have one.
_LIKELY = tuple(
    re.compile(pattern)
    for pattern in (
        r"^(?P<host>[A-Za-z][\w-]*(?:\.[\w-]+)*): ",  # pdsh, and with it DeepSpeed
        r"^ *(?P<rank>\d+): ",  # srun -l
        r"^\[(?P<rank>\d+)\] ",  # mpiexec -l
    )
)
_MOST = 0.6
_ROOT = re.compile(
    r"Root Cause \(first observed failure\):.*?host\s*: (?P<host>\S+).*?"
    r"rank\s*: (?P<rank>\d+) .*?exitcode\s*: (?P<code>-?\d+)",
    re.DOTALL,
)
_SUMMARY = re.compile(r"^(?:[EW]\d{4} [\d:.]+ +\d+ \S+\] ?)")


def split(text: str) -> list[Log]:
    """One log a rank, then what bears no label; ranks in order."""
    lines = [ERASED.sub("", line).rstrip() for line in text.splitlines()]
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


def root_cause(text: str) -> First | None:
    """Who failed first by torchrun's own summary, when the text has one."""
    plain = "\n".join(_SUMMARY.sub("", ERASED.sub("", line)) for line in text.splitlines())
    match = _ROOT.search(plain)
    if match is None:
        return None
    code = int(match["code"])
    kind = "signal" if code < 0 else "exit"
    return First(kind, match["host"], int(match["rank"]), f"exit status {code}")
