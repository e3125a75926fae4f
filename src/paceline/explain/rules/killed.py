"""A rank was killed from outside.

Meaning: A rank ended by SIGKILL (exit code -9 or 137) and the kernel's memory killer left no
    trace.
Cause: Somebody's kill -9, a scheduler or container runtime at its limit, or the memory killer on a
    host whose kernel log cannot be read.
Confirm: sudo dmesg -T | tail on that host; journalctl -k; the scheduler's accounting (sacct).
Remedy: If dmesg shows a killed process, see memory-killed: fewer workers, smaller batch, higher
    limit. Otherwise ask who ends processes there (cron jobs, other users' clean-up scripts).
Source: DeepSpeed 4239 and 6807, horovod 469.
"""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, define

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
        if end.signal == signal.SIGKILL and known:
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


rule = define("killed", __doc__, match, symptom=True)
