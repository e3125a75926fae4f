"""The kernel killed a rank for its memory."""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_exit, match_unit
from paceline.spec.events import Event
from paceline.spec.formatting import format_size

# a killed process counts if it can be one of a job
_JOB = r"\((?:python|pt_|torchrun|ray|deepspeed|train|cc1plus|cicc|nvcc|ptxas|a\.out)"
_OOM_KILL = re.compile(
    rf"(?:Memory cgroup out of memory|Out of memory): Kill(?:ed)? process \d{{1,12}} {_JOB}"
    rf"|Killed process \d{{1,12}} {_JOB}|oom-kill:.{{0,300}}task=(?:python|pt_|torchrun|ray)"
    r"|oom[-_]kill(?:er)? event|Detected \d+ oom[-_]kill|OOMKilled|: Out Of Memory$"
    r"|worker.{0,200}\bkilled\b.{0,200}out of memory|Exceeded (?:job|step) memory limit"
    r"|due to the node running low on memory|exceeded memory limit .{0,80} being killed",
    re.MULTILINE,
)


def match(evidence: Evidence) -> Match | None:
    for end in evidence.exits:
        if end["signal"] == signal.SIGKILL and _was_oom_killed(end):
            return _exit_match(end)
    for unit, _ in evidence.search(_OOM_KILL):
        line = unit.text.strip().splitlines()[0]
        cause = f"{unit.label}: the kernel killed a process for its memory: {line}"
        return match_unit(unit, cause[:300], 0.97)
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
