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
    last = next((event for event in reversed(evidence.events) if event.kind in _HANG_KINDS), None)
    if last is not None and last.kind == "hang":  # the job did not continue after it
        cause = f"the job hung: {last['text'] or ''}; it was then stopped by {name}"
        remedy = _REMEDY if last.rank is not None else _NETWORK
        hosts = (last.host,) if last.host else ()
        return Match(cause, hosts, last.rank, 0.99, remedy=remedy, confirm=_CONFIRM)
    remedy = f"Run again with the same --run-dir: {evidence.rerun_effect}."
    cause = f"nothing failed: the job was stopped by {name} at the launcher"
    return Match(cause, (), None, 0.99, remedy=remedy)
