"""Bytes of an encrypted connection were changed on the way."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event
from paceline.spec.failure import SECONDARY_ERROR

MAX_DELAY_S = 60.0  # between the end of a connection and that of a rank which used it


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    altered = _altered_at_failure(evidence.events)
    if failure is None or not altered or not (lost := [*evidence.search(SECONDARY_ERROR)]):
        return None
    host, address = altered[-1].host, altered[-1]["address"]
    cause = (
        f"{failure.where} lost a connection that Paceline ended, because bytes between {host} and"
        f" {address} were changed on the way, or another machine answered"
    )
    unit = lost[0][0]
    return Match(cause, (host,), failure.rank, 0.97, unit.lines[-1:], unit=unit)


def _altered_at_failure(events: Sequence[Event]) -> list[Event]:
    """Returns the changes shortly before the first rank of the last start ended."""
    starts = [number for number, event in enumerate(events) if event.kind == "started"]
    events = events[starts[-1] if starts else 0 :]
    ended_at = next((event.time for event in events if event.kind == "rank ended"), None)
    return [event for event in events if event.kind == "connection altered"
            and (ended_at is None or abs(ended_at - event.time) <= MAX_DELAY_S)]  # fmt: skip
