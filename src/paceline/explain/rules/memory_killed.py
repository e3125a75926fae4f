"""The kernel killed a rank for its memory."""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event

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
        cause = (
            f"{log.label}: the kernel killed a process for its memory: {log.lines[index].strip()}"
        )
        return Match(cause[:300], log.hosts, log.rank, 0.97, log.context(index))
    return None


def _was_oom_killed(end: Event) -> bool:
    memory = end["memory"] or {}
    if (
        memory.get("kills") is None
    ):  # no counter for this job: the kernel's log, which may concern others
        return bool(memory.get("kernel"))
    return bool(memory["kills"])


def _exit_match(end: Event) -> Match:
    memory = end["memory"] or {}
    limit, peak_bytes = memory.get("limit"), end["peak_bytes"]
    peak_text = f" at {_format_size(peak_bytes)}" if peak_bytes else ""
    limit_text = f" (limit {_format_size(limit['bytes'])}, {limit['group']})" if limit else ""
    cause = f"{end.where} was killed by the kernel for its memory{peak_text}{limit_text}"
    return Match(cause, (end.host,), end.rank, 0.99, tuple(memory.get("kernel") or ()))


def _format_size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
