"""The kernel killed a rank for its memory."""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event

_WORDS = re.compile(
    r"Memory cgroup out of memory: Killed process|Out of memory: Kill(?:ed)? process"
    r"|oom[-_]kill(?:er)? event|Detected \d+ oom[-_]kill|OOMKilled"
    r"|Killed process \d{1,12} .{0,300}anon-rss|worker.{0,200}\bkilled\b.{0,200}out of memory"
)


def match(evidence: Evidence) -> Match | None:
    for end in evidence.ends:
        if end["signal"] == signal.SIGKILL and _by_kernel(end):
            return _of_end(end)
    for log, at, _ in evidence.search(_WORDS):
        hosts = (log.host,) if log.host else ()
        cause = f"{log.where}: the kernel killed a process for its memory: {log.lines[at].strip()}"
        return Match(cause[:300], hosts, log.rank, 0.97, log.lines[max(0, at - 2) : at + 3])
    return None


def _by_kernel(end: Event) -> bool:
    left = end["memory"] or {}
    if left.get("kills") is None:  # no counter of our own: the kernel's log, which tells of others
        return bool(left.get("kernel"))
    return bool(left["kills"])


def _of_end(end: Event) -> Match:
    left = end["memory"] or {}
    limit, most = left.get("limit"), end["peak_bytes"]
    peak = f" at {_size(most)}" if most else ""
    under = f" (limit {_size(limit['bytes'])}, {limit['group']})" if limit else ""
    cause = f"{end.where} was killed by the kernel for its memory{peak}{under}"
    return Match(cause, (end.host,), end.rank, 0.99, tuple(left.get("kernel") or ()))


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
