"""The job could not be started."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match

_FIELD = re.compile(r"^  (found|remedy): +([^\n]*(?:\n   [^\n]*)*)", re.MULTILINE)


def match(evidence: Evidence) -> Match | None:
    error = evidence.result.error
    if not error:
        return None
    message = error.splitlines()[0].removeprefix("paceline: ")
    parts = {name: _dedent(text) for name, text in _FIELD.findall(error)}
    details = f": {parts['found'].splitlines()[0]}" if parts.get("found") else ""
    lines = tuple(error.splitlines())
    return Match(f"{message}{details}", (), None, 0.99, lines, remedy=parts.get("remedy", ""))


def _dedent(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())
