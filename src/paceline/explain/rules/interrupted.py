"""The job was stopped from outside."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.failure import signal_name

_ABOUT = ("started", "hang", "hang over")
_CONFIRM = 'events.jsonl: "hang" says who stood where'
_NETWORK = "paceline check tries every direction between the hosts"
_REMEDY = "Let every rank come to the same collectives in the same order; look at the named line"


def match(evidence: Evidence) -> Match | None:
    if not evidence.result.interrupted:
        return None
    name = signal_name(evidence.result.interrupted)
    hang = standing_hang(evidence)
    if hang is not None:
        text, host, rank = hang
        cause = f"the job hung: {text}; it was then stopped by {name}"
        remedy = _REMEDY if rank is not None else _NETWORK
        hosts = (host,) if host else ()
        return Match(cause, hosts, rank, 0.99, remedy=remedy, confirm=_CONFIRM)
    remedy = f"Run again with the same --run-dir: {evidence.again}."
    cause = f"nothing failed: the job was stopped by {name} at the launcher"
    return Match(cause, (), None, 0.99, remedy=remedy)


def standing_hang(evidence: Evidence) -> tuple[str, str, int | None] | None:
    """Text, host and rank of the last hang that was told, unless the job went on after it."""
    told = [event for event in evidence.events if event.kind in _ABOUT]
    if not told or told[-1].kind != "hang":
        return None
    last = told[-1]
    return str(last["text"] or ""), last.host, last.rank
