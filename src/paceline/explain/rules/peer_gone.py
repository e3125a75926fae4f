"""Ranks lost their connection to one that ended first."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit
from paceline.spec.failure import PEER_LOST

_LOST = re.compile(
    f"{PEER_LOST.pattern}|Connection closed by remote peer|remote process exited"
    r"|detected by watchdog at work"
)


def match(evidence: Evidence) -> Match | None:
    """Names the only rank that neither complains nor goes on; with none or several, nothing."""
    lost = [unit for unit, _ in evidence.search(_LOST) if unit.rank is not None]
    silent = evidence.outcome.ranks - evidence.outcome.running - {unit.rank for unit in lost}
    if not lost or len(silent) != 1 or evidence.events:
        return None
    rank = min(silent)
    cause = f"rank {rank} ended first: {lost[0].label} lost its connection to it"
    found = match_unit(lost[0], cause, 0.6)
    return Match(cause, (), rank, found.confidence, found.lines, unit=lost[0])
