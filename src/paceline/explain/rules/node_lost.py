"""A node was lost while the job ran."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.explain.rules.connection_altered import altered_link


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    if failure is None or failure.kind != "lost":
        return None
    if altered_link(evidence, failure.host) is not None:
        return None  # connection-altered explains it
    return Match(f"{failure.host} went away: {failure.headline}", (failure.host,), None, 0.97)
