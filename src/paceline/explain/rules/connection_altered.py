"""Bytes of an encrypted connection were changed on the way."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event
from paceline.spec.failure import SECONDARY_ERROR, Failure

MAX_DELAY_S = 60.0  # between the end of a connection and that of a rank which used it


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    if failure is not None and failure.kind == "lost":
        return _match_lost_host(evidence, failure)
    if failure is None or not (lost := [*evidence.search(SECONDARY_ERROR)]):
        return None
    altered = _altered_at_failure(evidence.events, failure)
    if not altered:
        return None
    host, address = altered[-1].host, altered[-1]["address"]
    cause = (
        f"{failure.where} lost a connection that Paceline ended, because bytes between {host} and"
        f" {address} were changed on the way, or another machine answered"
    )
    unit = lost[0][0]
    return Match(cause, (host,), failure.rank, 0.97, unit.lines[-1:], unit=unit)


def _match_lost_host(evidence: Evidence, failure: Failure) -> Match | None:
    altered = altered_link(evidence, failure.host)
    if altered is None:
        return None
    cause = (
        f"{failure.host} went away: {failure.headline}; bytes between it and the launcher"
        f" ({altered['address']}) had been changed on the way"
    )
    return Match(cause, (failure.host,), None, 0.97)


def altered_link(evidence: Evidence, host: str) -> Event | None:
    """The change that broke a host's connection to the launcher, unless it was restored."""
    changes = [event for event in evidence.last_attempt if event.host == host
               and (event.kind == "connection restored" or event["to_launcher"])]  # fmt: skip
    return changes[-1] if changes and changes[-1].kind == "connection altered" else None


def _altered_at_failure(events: Sequence[Event], failure: Failure) -> list[Event]:
    """Returns the changes shortly before or after the last end of the rank that failed first."""
    times = [event.time for event in events
             if event.kind == "rank ended" and event.rank == failure.rank]  # fmt: skip
    ended_at = times[-1] if times else None
    return [event for event in events
            if event.kind == "connection altered" and not event["to_launcher"]
            and (ended_at is None or abs(ended_at - event.time) <= MAX_DELAY_S)]  # fmt: skip
