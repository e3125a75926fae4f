"""A rank was killed from outside."""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match

_WORDS = re.compile(
    r"exitcode: -9|exit ?code:? (?:-9|137)\b|Signal 9 \(SIGKILL\)|died with <Signals.SIGKILL: 9>"
    r"|signal 9 \(Killed\)|: Killed$"
)


def match(evidence: Evidence) -> Match | None:
    if evidence.first is not None and evidence.first.kind not in ("signal", "exit"):
        return None
    for end in evidence.ends:
        known = evidence.first is None or (end.host, end.rank) == (
            evidence.first.host,
            evidence.first.rank,
        )
        if end["signal"] == signal.SIGKILL and known:
            where = end.where
            cause = f"{where} was killed from outside (SIGKILL)"
            return Match(cause, (end.host,) if end.host else (), end.rank, 0.6)
    if not evidence.ends:
        for log, at, _ in evidence.search(_WORDS):
            hosts = (log.host,) if log.host else ()
            lines = log.lines[max(0, at - 2) : at + 3]
            return Match(f"{log.where} was killed from outside (SIGKILL)", hosts, log.rank, 0.6,
                         lines)  # fmt: skip
    return None
