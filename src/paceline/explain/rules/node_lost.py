"""A node went away while the job ran."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match


def match(evidence: Evidence) -> Match | None:
    first = evidence.first
    if first is None or first.kind != "lost":
        return None
    return Match(f"{first.host} went away: {first.headline}", (first.host,), None, 0.97)
