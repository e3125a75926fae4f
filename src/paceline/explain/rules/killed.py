"""A rank was killed from outside."""

from __future__ import annotations

import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_exit, match_unit
from paceline.spec.events import Event


def _exclude_oom_killer(end: Event) -> tuple[str, str]:
    """Texts for confirm and remedy if the kernel reports that it killed nothing."""
    memory = end["memory"] or {}
    if memory.get("kills") != 0 or memory.get("kernel"):
        return "", ""
    return (
        f"On {end.host}: `journalctl` around that time; the scheduler's accounting "
        "(`sacct -j JOB`). It was not the kernel's memory killer: that killed nothing there.",
        f"Ask who ends processes on {end.host}: a person, a cron job, another user's "
        "clean-up script, a scheduler or container runtime at its limit.",
    )


def match(evidence: Evidence) -> Match | None:
    first = evidence.first_failure
    if first is not None and first.kind not in ("signal", "exit"):
        return None
    for end in evidence.exits:
        is_first = first is None or (end.host, end.rank) == (first.host, first.rank)
        if end["signal"] == signal.SIGKILL and is_first:
            confirm, remedy = _exclude_oom_killer(end)
            return match_exit(end, f"{end.where} was killed from outside (SIGKILL)", 0.6,
                              remedy=remedy, confirm=confirm)  # fmt: skip
    if not evidence.exits and not evidence.events:
        for unit in evidence.outcome.failures:
            is_killed = any(end.signal == signal.SIGKILL for end in unit.exits)
            if is_killed or "is killed by signal: Killed" in unit.text:
                return match_unit(unit, f"{unit.label} was killed from outside (SIGKILL)", 0.6)
    return None
