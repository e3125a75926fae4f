"""The job could not be started."""

from __future__ import annotations

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, parse_error_fields


def match(evidence: Evidence) -> Match | None:
    error = evidence.result.error
    if not error:
        return None
    message = error.splitlines()[0].removeprefix("paceline: ")
    parts = parse_error_fields(error)
    details = f": {parts['found'].splitlines()[0]}" if parts.get("found") else ""
    lines = tuple(error.splitlines())
    return Match(f"{message}{details}", (), None, 0.99, lines, remedy=parts.get("remedy", ""))
