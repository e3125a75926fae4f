"""Bytes of an encrypted connection were changed on the way."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.failure import SECONDARY_ERROR


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    altered = [event for event in evidence.events if event.kind == "connection altered"]
    if failure is None or not altered or not (lost := [*evidence.search(SECONDARY_ERROR)]):
        return None
    host, address = altered[-1].host, altered[-1]["address"]
    cause = (
        f"{failure.where} lost a connection that Paceline ended, because bytes between {host} and"
        f" {address} were changed on the way, or another machine answered"
    )
    unit = lost[0][0]
    return Match(cause, (host,), failure.rank, 0.97, unit.lines[-1:], unit=unit)
