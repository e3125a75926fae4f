"""A rank crashed in compiled code."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match

_NAMES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}
_WORDS = re.compile(
    r"Signal (?:4|6|7|8|11) \((?P<name>SIG\w+)\)|(?P<words>Segmentation fault|Illegal instruction)"
    r"|Fatal Python error: (?P<fatal>.+)|exitcode: -(?P<number>4|6|7|8|11)\b"
)


def match(evidence: Evidence) -> Match | None:
    for end in evidence.ends:
        if end["signal"] in _NAMES:
            where = end.where
            cause = f"{where} crashed in compiled code ({_NAMES[end['signal']]})"
            return Match(cause, (end.host,) if end.host else (), end.rank, 0.8)
    for log, at, found in evidence.search(_WORDS):
        number = found["number"]
        what = found["name"] or found["words"] or found["fatal"] or _NAMES[int(number)]
        hosts = (log.host,) if log.host else ()
        lines = log.lines[max(0, at - 2) : at + 3]
        cause = f"{log.where} crashed in compiled code ({what.strip()})"
        return Match(cause, hosts, log.rank, 0.7, lines)
    return None
