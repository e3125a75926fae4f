"""A rank was killed from outside."""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event

_KILLED = re.compile(
    r"exitcode: -9|exit ?code:? (?:-9|137)\b|Signal 9 \(SIGKILL\)|died with <Signals.SIGKILL: 9>"
    r"|signal 9 \(Killed\)|: Killed$"
)


def _exclude_oom_killer(end: Event) -> tuple[str, str]:
    """Texts for confirm and remedy if the kernel reports that it killed nothing."""
    memory = end["memory"] or {}
    if memory.get("kills") != 0 or memory.get("kernel"):
        return "", ""
    return (
        f"On {end.host}: journalctl around that time; the scheduler's accounting "
        "(sacct). It was not the kernel's memory killer: that killed nothing there.",
        f"Ask who ends processes on {end.host}: a person, a cron job, another user's "
        "clean-up script, a scheduler or container runtime at its limit.",
    )


def match(evidence: Evidence) -> Match | None:
    if evidence.first_failure is not None and evidence.first_failure.kind not in ("signal", "exit"):
        return None
    for end in evidence.exits:
        is_first_failure = evidence.first_failure is None or (end.host, end.rank) == (
            evidence.first_failure.host,
            evidence.first_failure.rank,
        )
        if end["signal"] == signal.SIGKILL and is_first_failure:
            label = end.where
            cause = f"{label} was killed from outside (SIGKILL)"
            hosts = (end.host,) if end.host else ()
            confirm, remedy = _exclude_oom_killer(end)
            return Match(cause, hosts, end.rank, 0.6, (), remedy, confirm)
    if not evidence.exits:
        for log, index, _ in evidence.search(_KILLED):
            lines = log.context(index)
            return Match(f"{log.label} was killed from outside (SIGKILL)", log.hosts, log.rank, 0.6,
                         lines)  # fmt: skip
    return None
