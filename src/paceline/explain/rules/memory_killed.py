"""The kernel killed a rank for its memory."""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_exit, match_line
from paceline.spec.events import Event
from paceline.spec.formatting import format_size

_OOM_KILL = re.compile(
    r"Memory cgroup out of memory: Killed process|Out of memory: Kill(?:ed)? process"
    r"|oom[-_]kill(?:er)? event|Detected \d+ oom[-_]kill|OOMKilled"
    r"|Killed process \d{1,12} .{0,300}anon-rss|worker.{0,200}\bkilled\b.{0,200}out of memory"
)


def match(evidence: Evidence) -> Match | None:
    for end in evidence.exits:
        if end["signal"] == signal.SIGKILL and _was_oom_killed(end):
            return _exit_match(end)
    for log, index, _ in evidence.search(_OOM_KILL):
        line = log.lines[index].strip()
        cause = f"{log.label}: the kernel killed a process for its memory: {line}"
        return match_line(log, index, cause[:300], 0.97)
    return None


def _was_oom_killed(end: Event) -> bool:
    memory = end["memory"] or {}
    kills = memory.get("kills")  # without a counter, the kernel's log may concern other jobs
    return bool(memory.get("kernel") if kills is None else kills)


def _exit_match(end: Event) -> Match:
    memory = end["memory"] or {}
    limit, peak_bytes = memory.get("limit"), end["peak_bytes"]
    peak_text = f" at {format_size(peak_bytes)}" if peak_bytes else ""
    limit_text = f" (limit {format_size(limit['bytes'])}, {limit['group']})" if limit else ""
    cause = f"{end.where} was killed by the kernel for its memory{peak_text}{limit_text}"
    return match_exit(end, cause, 0.99, lines=tuple(memory.get("kernel") or ()))
