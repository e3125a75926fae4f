"""A process that is not of the job connected to a rank."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    if failure is None or failure.kind not in ("stranger",):
        return None
    return Match(failure.describe(), (failure.host,), None, 0.97)
