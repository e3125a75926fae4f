"""A rank crashed in compiled code."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match

_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}
_CRASH = re.compile(
    r"Signal (?:4|6|7|8|11) \((?P<name>SIG\w+)\)|(?P<words>Segmentation fault|Illegal instruction)"
    r"|Fatal Python error: (?P<fatal>.+)|exitcode: -(?P<number>4|6|7|8|11)\b"
)
# torch 2.13 crashes in DistributedDataParallel's constructor with this debug level
_DETAIL_LEVEL = re.compile(r"The debug level is set to DETAIL|in _ddp_init_helper$")
_LESS_DETAIL = (
    "Unset TORCH_DISTRIBUTED_DEBUG=DETAIL, or set INFO: with DETAIL, torch 2.13 crashes in the "
    "constructor of DistributedDataParallel."
)


def match(evidence: Evidence) -> Match | None:
    logs = (*evidence.logs, *evidence.debug)
    detail = any(_DETAIL_LEVEL.search(line) for log in logs for line in log.lines)
    remedy = _LESS_DETAIL if detail else ""
    for end in evidence.exits:
        if end["signal"] in _SIGNALS:
            label = end.where
            cause = f"{label} crashed in compiled code ({_SIGNALS[end['signal']]})"
            return Match(
                cause,
                (end.host,) if end.host else (),
                end.rank,
                0.8,
                remedy=remedy,
            )
    for log, index, crash in evidence.search(_CRASH):
        number = crash["number"]
        signal_text = crash["name"] or crash["words"] or crash["fatal"] or _SIGNALS[int(number)]
        lines = log.context(index)
        cause = f"{log.label} crashed in compiled code ({signal_text.strip()})"
        return Match(cause, log.hosts, log.rank, 0.7, lines, remedy)
    return None
