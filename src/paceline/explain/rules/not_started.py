"""The job could not be started.

Meaning: The launcher refused to start, or could not; no rank has run.
Cause: The launcher's own message says it: a login, an interpreter, torch, a port, the network,
    different code.
Confirm: paceline check -H HOSTS looks at all hosts and all causes at once.
Remedy: Do what the message says; then paceline check -H HOSTS --quick.
Source: the run's result.json.
"""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, define

_PARTS = re.compile(r"^  (found|remedy): +([^\n]*(?:\n   [^\n]*)*)", re.MULTILINE)


def match(evidence: Evidence) -> Match | None:
    error = evidence.result.error
    if not error:
        return None
    message = error.splitlines()[0].removeprefix("paceline: ")
    parts = {name: _joined(text) for name, text in _PARTS.findall(error)}
    found = f": {parts['found'].splitlines()[0]}" if parts.get("found") else ""
    lines = tuple(error.splitlines())
    return Match(f"{message}{found}", (), None, 0.99, lines, remedy=parts.get("remedy", ""))


def _joined(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


rule = define("not-started", __doc__, match)
