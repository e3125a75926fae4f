"""The ranks trained different models, and nothing else explains how the run ended."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.explain.rules import uneven_data


def match(evidence: Evidence) -> Match | None:
    cause = evidence.replica_difference
    if not cause:
        return None
    early = uneven_data.match_early_end(evidence)
    if early is not None:
        return Match(cause, confidence=0.95, lines=(early.cause, *early.lines))
    failure = evidence.first_failure
    is_its_end = failure is not None and failure.kind in ("hang", "replicas")
    return Match(cause, confidence=0.95) if is_its_end or evidence.result.exit_code == 0 else None
