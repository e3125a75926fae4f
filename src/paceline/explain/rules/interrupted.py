"""The job was stopped from outside."""

from __future__ import annotations

from signal import SIGINT, SIGTERM

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit
from paceline.explain.rules.hang import describe, remedy_for, unresolved_hang
from paceline.explain.units import Unit
from paceline.spec.failure import format_location, signal_name

_CONFIRM = 'The event "hang" in `events.jsonl` says where each rank was.'
_NETWORK = "`paceline check -H HOSTS` tries every direction between the hosts."
_REMEDY = "Make every rank call the same collectives in the same order; look at the named line."
_REASON = (
    "Before the stop, a rank was stopped, waited for something else, took another branch or called"
    " another collective; or the network let data through in one direction only."
)


def _log_match(evidence: Evidence) -> Match | None:
    """A log in which nothing but a request to stop ended the processes."""
    outcome = evidence.outcome
    if outcome.failures or any(unit.level == "error" for unit in outcome.context):
        return None
    stops = [(unit, end) for unit in outcome.consequences for end in unit.exits
             if end.signal in (SIGINT, SIGTERM)]  # fmt: skip
    for unit, end in sorted(stops, key=lambda stop: not stop[1].is_root):
        where = format_location(end.host, end.rank) if end.is_root else unit.label
        return _stop_match(unit, where, signal_name(end.signal or SIGINT))
    for unit in outcome.consequences:
        if unit.error is not None and unit.error.type.endswith("KeyboardInterrupt"):
            return _stop_match(unit, unit.label, "SIGINT")
    return None


def _stop_match(unit: Unit, where: str, name: str) -> Match:
    cause = f"nothing failed by itself: {where} was stopped from outside ({name})"
    return match_unit(unit, cause, 0.6)


def match(evidence: Evidence) -> Match | None:
    if not evidence.result.interrupted:
        return None if evidence.events else _log_match(evidence)
    name = signal_name(evidence.result.interrupted)
    if (hang := unresolved_hang(evidence.events)) is not None:
        cause = f"{describe(hang)}; it was then stopped by {name}"
        general_remedy = _REMEDY if hang.rank is not None else _NETWORK
        remedy = remedy_for(hang["text"] or "") or general_remedy
        hosts = (hang.host,) if hang.host else ()
        return Match(cause, hosts, hang.rank, 0.99, remedy=remedy, confirm=_CONFIRM, reason=_REASON)
    remedy = f"Run again with the same `--run-dir FOLDER`: {evidence.rerun_effect}."
    cause = f"nothing failed: the job was stopped by {name} at the launcher"
    return Match(cause, (), None, 0.99, remedy=remedy)
