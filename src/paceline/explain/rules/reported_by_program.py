"""A rank reported itself why it ended."""

from __future__ import annotations

import re
from itertools import takewhile

from paceline.explain.evidence import Evidence, Log
from paceline.explain.rule import Match

_MESSAGE = re.compile(r"^paceline: (?P<message>\S.*)$")
_CONCLUSION = "cause: "
_FIELD = re.compile(r"^  (?P<name>found|remedy): +(?P<text>.*)$")


def match(evidence: Evidence) -> Match | None:
    return next(filter(None, map(_last_message, evidence.logs)), None)


def _last_message(log: Log) -> Match | None:
    """Finds the last message of a rank that has details; mere notes have none."""
    starts = [start for start, line in enumerate(log.lines) if _MESSAGE.match(line)]
    for start in reversed(starts):
        indented = takewhile(lambda line: line.startswith("  "), log.lines[start + 1 :])
        lines = (log.lines[start], *indented)
        fields = {field["name"]: field["text"] for line in lines if (field := _FIELD.match(line))}
        if not fields:
            continue
        details = f": {fields['found']}" if fields.get("found") else ""
        message = log.lines[start].removeprefix("paceline: ")
        remedy = fields.get("remedy", "")
        if message.startswith(_CONCLUSION):  # of the launcher, which names the rank
            cause = message.removeprefix(_CONCLUSION)
        else:
            cause = f"{log.label}: {message}{details}"
        return Match(cause, log.hosts, log.rank, 0.85, lines, remedy)
    return None
