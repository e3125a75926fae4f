"""Hosts received no heartbeat from the launcher."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    if failure is None or failure.kind not in ("launcher", "lease"):
        return None
    return Match(failure.describe(), (failure.host,) if failure.kind == "lease" else (), None, 0.97)
