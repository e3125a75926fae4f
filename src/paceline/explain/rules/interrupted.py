"""The job was stopped from outside."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.failure import signal_name

_HANG_KINDS = ("started", "hang", "hang over")
_CONFIRM = 'events.jsonl: the event "hang" says where each rank was'
_NETWORK = "paceline check tries every direction between the hosts"
_REMEDY = "Make every rank call the same collectives in the same order; look at the named line"


def match(evidence: Evidence) -> Match | None:
    if not evidence.result.interrupted:
        return None
    name = signal_name(evidence.result.interrupted)
    hang = ongoing_hang(evidence)
    if hang is not None:
        text, host, rank = hang
        cause = f"the job hung: {text}; it was then stopped by {name}"
        remedy = _REMEDY if rank is not None else _NETWORK
        hosts = (host,) if host else ()
        return Match(cause, hosts, rank, 0.99, remedy=remedy, confirm=_CONFIRM)
    remedy = f"Run again with the same --run-dir: {evidence.rerun_effect}."
    cause = f"nothing failed: the job was stopped by {name} at the launcher"
    return Match(cause, (), None, 0.99, remedy=remedy)


def ongoing_hang(evidence: Evidence) -> tuple[str, str, int | None] | None:
    """Text, host and rank of the last hang, unless the job continued after it."""
    events = [event for event in evidence.events if event.kind in _HANG_KINDS]
    if not events or events[-1].kind != "hang":
        return None
    last_event = events[-1]
    return str(last_event["text"] or ""), last_event.host, last_event.rank
