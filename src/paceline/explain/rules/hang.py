"""The job hung and was stopped for that reason."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    if failure is None or failure.kind != "hang":
        return None
    subject = failure.where if failure.rank is not None else "the job"
    hosts = (failure.host,) if failure.rank is not None else ()
    return Match(f"{subject} {failure.headline}", hosts, failure.rank, 0.98)
