"""A rank raised an exception."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.explain.evidence import Evidence, Log
from paceline.explain.rule import Match
from paceline.spec.failure import PEER_LOST

_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'^ +File "(?P<file>[^"]{1,1000})", line (?P<line>\d+)')
_EXCEPTION_LINE = re.compile(
    r"^(?P<kind>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure))(?::|$)"
)
_LAUNCHER_EXCEPTIONS = ("ChildFailedError", "CalledProcessError", "SignalException", "SystemExit")
_LIBRARY_PATHS = ("site-packages", "/lib/python", "<frozen", "<string>")
_LOG_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL)\b")
MAX_LINES = 12


def match(evidence: Evidence) -> Match | None:
    first = evidence.first_failure
    if first is not None and first.kind == "exception" and first.traceback:
        log = Log.from_text(first.host, first.rank, first.traceback)
        if match := _last_traceback(log):
            return match
        if PEER_LOST.search(first.headline):
            return None
        cause, lines = f"{first.where} raised {first.headline}", log.lines[-MAX_LINES:]
        return Match(cause, log.hosts, log.rank, 0.8, lines)
    return next(filter(None, map(_last_traceback, evidence.logs)), None)


def _last_traceback(log: Log) -> Match | None:
    """Finds the last uncaught traceback in a log."""
    starts = [index for index, line in enumerate(log.lines) if line.strip() == _START]
    for start in reversed(starts):
        end = _traceback_end(log.lines, start)
        if end is None:
            continue
        kind = _EXCEPTION_LINE.match(log.lines[end].strip())
        if kind is None or kind["kind"].rpartition(".")[2] in _LAUNCHER_EXCEPTIONS:
            continue
        if PEER_LOST.search(log.lines[end]) or _was_logged(log.lines, start, end):
            continue
        script_line = _script_line(log.lines[start:end])
        lines = log.lines[max(start, end - MAX_LINES) : end + 1]
        cause = f"{log.label} raised {log.lines[end].strip()[:200]}{script_line}"
        return Match(cause, log.hosts, log.rank, 0.8, lines)
    return None


def _traceback_end(lines: Sequence[str], start: int) -> int | None:
    for index in range(start + 1, len(lines)):
        if lines[index] and not lines[index].startswith(" "):
            return index
    return None


def _was_logged(lines: Sequence[str], start: int, end: int) -> bool:
    """Whether a logger wrote the traceback and the program continued."""
    preceding = lines[start - 1] if start else ""
    continued = any(line.strip() for line in lines[end + 1 :])
    return continued and _LOG_LEVEL.search(preceding) is not None


def _script_line(lines: Sequence[str]) -> str:
    """File and line of the innermost frame in the user's own code."""
    frames = [match for line in lines if (match := _FRAME.match(line))]
    in_script = [frame for frame in frames
                 if not any(path in frame["file"] for path in _LIBRARY_PATHS)]  # fmt: skip
    for frame in reversed(in_script or frames):
        return f" ({frame['file'].rpartition('/')[2]}, line {frame['line']})"
    return ""
