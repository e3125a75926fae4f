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
# torch 2.13 as it builds a DistributedDataParallel whose group is wrapped to compare collectives
_DETAIL = re.compile(r"The debug level is set to DETAIL|in _ddp_init_helper$")
_LESS_DETAIL = (
    "Take TORCH_DISTRIBUTED_DEBUG=DETAIL away, or set INFO: with DETAIL, torch 2.13 crashes as it "
    "builds a DistributedDataParallel."
)


def match(evidence: Evidence) -> Match | None:
    logs = (*evidence.logs, *evidence.debug)
    detail = any(_DETAIL.search(line) for log in logs for line in log.lines)
    remedy = _LESS_DETAIL if detail else ""
    for end in evidence.ends:
        if end["signal"] in _NAMES:
            where = end.where
            cause = f"{where} crashed in compiled code ({_NAMES[end['signal']]})"
            return Match(cause, (end.host,) if end.host else (), end.rank, 0.8, remedy=remedy)
    for log, at, found in evidence.search(_WORDS):
        number = found["number"]
        what = found["name"] or found["words"] or found["fatal"] or _NAMES[int(number)]
        hosts = (log.host,) if log.host else ()
        lines = log.lines[max(0, at - 2) : at + 3]
        cause = f"{log.where} crashed in compiled code ({what.strip()})"
        return Match(cause, hosts, log.rank, 0.7, lines, remedy)
    return None
