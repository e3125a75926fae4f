"""The job hung, and was ended for it."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match


def match(evidence: Evidence) -> Match | None:
    first = evidence.first
    if first is None or first.kind != "hang":
        return None
    who = first.where if first.rank is not None else "the job"
    hosts = (first.host,) if first.rank is not None else ()
    return Match(f"{who} {first.headline}", hosts, first.rank, 0.98)
