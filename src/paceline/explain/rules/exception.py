"""A rank raised an exception."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.explain.evidence import Evidence, Log
from paceline.explain.rule import Match
from paceline.spec.failure import PEER_GONE

_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'^ +File "(?P<file>[^"]{1,1000})", line (?P<line>\d+)')
_LAST = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure))"
                   r"(?::|$)")  # fmt: skip
_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "SignalException", "SystemExit")
_LIBRARY = ("site-packages", "/lib/python", "<frozen", "<string>")
_LOGGED = re.compile(r"\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL)\b")
LINES = 12


def match(evidence: Evidence) -> Match | None:
    first = evidence.first
    if first is not None and first.kind == "exception" and first.traceback:
        own = Log.of(first.host, first.rank, first.traceback)
        return _of_log(own) or _headline(first.headline, own)
    found = (_of_log(log) for log in evidence.logs)
    return next((match for match in found if match is not None), None)


def _headline(headline: str, log: Log) -> Match | None:
    if PEER_GONE.search(headline):
        return None
    return Match(f"{log.where} raised {headline}", (log.host,), log.rank, 0.8, log.lines[-LINES:])


def _of_log(log: Log) -> Match | None:
    """The last uncaught traceback of a rank: nothing but its own output's end may follow."""
    starts = [at for at, line in enumerate(log.lines) if line.strip() == _START]
    for start in reversed(starts):
        end = _end(log.lines, start)
        if end is None:
            continue
        kind = _LAST.match(log.lines[end].strip())
        if kind is None or kind["kind"].rpartition(".")[2] in _LAUNCHERS:
            continue
        if PEER_GONE.search(log.lines[end]) or _handled(log.lines, start, end):
            continue
        place = _place(log.lines[start:end])
        hosts = (log.host,) if log.host else ()
        lines = log.lines[max(start, end - LINES) : end + 1]
        cause = f"{log.where} raised {log.lines[end].strip()[:200]}{place}"
        return Match(cause, hosts, log.rank, 0.8, lines)
    return None


def _end(lines: Sequence[str], start: int) -> int | None:
    for at in range(start + 1, len(lines)):
        if lines[at] and not lines[at].startswith(" "):
            return at
    return None


def _handled(lines: Sequence[str], start: int, end: int) -> bool:
    """Whether a logger wrote the traceback and the program went on."""
    before = lines[start - 1] if start else ""
    went_on = any(line.strip() for line in lines[end + 1 :])
    return went_on and _LOGGED.search(before) is not None


def _place(lines: Sequence[str]) -> str:
    """The innermost frame that is the user's own."""
    frames = [found for line in lines if (found := _FRAME.match(line))]
    own = [f for f in frames if not any(mark in f["file"] for mark in _LIBRARY)] or frames
    return f" ({own[-1]['file'].rpartition('/')[2]}, line {own[-1]['line']})" if own else ""
