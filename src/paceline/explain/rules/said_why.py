"""A rank said itself why it ended."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence, Log
from paceline.explain.rule import Match

_HEAD = re.compile(r"^paceline: (?P<message>\S.*)$")
_PART = re.compile(r"^  (?P<name>found|remedy): +(?P<text>.*)$")


def match(evidence: Evidence) -> Match | None:
    said = (_of_log(log) for log in evidence.logs)
    return next((match for match in said if match is not None), None)


def _of_log(log: Log) -> Match | None:
    """The last of its messages, if it has parts: notes have none."""
    heads = [at for at, line in enumerate(log.lines) if _HEAD.match(line)]
    for at in reversed(heads):
        end = next(
            (n for n in range(at + 1, len(log.lines)) if not log.lines[n].startswith("  ")),
            len(log.lines),
        )
        parts = {
            m["name"]: m["text"] for line in log.lines[at + 1 : end] if (m := _PART.match(line))
        }
        if not parts:
            continue
        found = f": {parts['found']}" if parts.get("found") else ""
        message = log.lines[at].removeprefix("paceline: ")
        hosts = (log.host,) if log.host else ()
        lines = log.lines[at:end]
        remedy = parts.get("remedy", "")
        return Match(f"{log.where}: {message}{found}", hosts, log.rank, 0.85, lines, remedy)
    return None
