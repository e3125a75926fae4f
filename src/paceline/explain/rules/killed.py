"""A rank was killed from outside."""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event

_WORDS = re.compile(
    r"exitcode: -9|exit ?code:? (?:-9|137)\b|Signal 9 \(SIGKILL\)|died with <Signals.SIGKILL: 9>"
    r"|signal 9 \(Killed\)|: Killed$"
)


def _without_memory_killer(end: Event) -> tuple[str, str]:
    """How to confirm and what to do where the kernel has told that it killed nothing."""
    left = end["memory"] or {}
    if left.get("kills") != 0 or left.get("kernel"):
        return "", ""
    return (
        f"On {end.host}: journalctl around that time; the scheduler's accounting "
        "(sacct). It was not the kernel's memory killer: that killed nothing there.",
        f"Ask who ends processes on {end.host}: a person, a cron job, another user's "
        "clean-up script, a scheduler or container runtime at its limit.",
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
            hosts = (end.host,) if end.host else ()
            confirm, remedy = _without_memory_killer(end)
            return Match(cause, hosts, end.rank, 0.6, (), remedy, confirm)
    if not evidence.ends:
        for log, at, _ in evidence.search(_WORDS):
            hosts = (log.host,) if log.host else ()
            lines = log.lines[max(0, at - 2) : at + 3]
            return Match(f"{log.where} was killed from outside (SIGKILL)", hosts, log.rank, 0.6,
                         lines)  # fmt: skip
    return None
