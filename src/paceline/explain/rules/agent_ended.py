"""Paceline's own processes on a host ended."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.failure import OUT_OF_MEMORY


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    if failure is None or failure.kind not in ("agent", "forkserver"):
        return None
    if OUT_OF_MEMORY in failure.headline:  # the rule memory-killed describes it
        return None
    return Match(failure.describe(), (failure.host,), None, 0.97)
