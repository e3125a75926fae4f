"""The kernel killed a rank for its memory."""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_exit, match_unit
from paceline.spec.events import Event
from paceline.spec.failure import OUT_OF_MEMORY, describe_end, is_oom_kill

# a killed process counts if it can be one of a job
_JOB = r"\((?:python|pt_|torchrun|ray|deepspeed|train|cc1plus|cicc|nvcc|ptxas|a\.out)"
_OOM_KILL = re.compile(
    rf"(?:Memory cgroup out of memory|Out of memory): Kill(?:ed)? process \d{{1,12}} {_JOB}"
    rf"|Killed process \d{{1,12}} {_JOB}|oom-kill:.{{0,300}}task=(?:python|pt_|torchrun|ray)"
    r"|oom[-_]kill(?:er)? event|Detected \d+ oom[-_]kill|OOMKilled|: Out Of Memory$"
    r"|worker.{0,200}\bkilled\b.{0,200}out of memory|Exceeded (?:job|step) memory limit"
    r"|TERM_MEMLIMIT|due to the node running low on memory"
    r"|[1-9]\d{0,9} Workers .{0,40}killed due to memory pressure"
    r"|exceeded memory limit .{0,80} being killed",
    re.MULTILINE,
)

_BY_RAY = re.compile(r"node running low on memory|memory pressure")


def match(evidence: Evidence) -> Match | None:
    for end in evidence.exits:
        if end["signal"] == signal.SIGKILL and is_oom_kill(end["memory"] or {}):
            return _exit_match(end)
    first = evidence.first_failure
    if first is not None and first.kind == "forkserver" and OUT_OF_MEMORY in first.headline:
        return Match(first.describe(), (first.host,), None, 0.99)
    for unit, _ in evidence.search(_OOM_KILL):
        line = unit.text.strip().splitlines()[0]
        killer = "Ray" if _BY_RAY.search(unit.text) else "the kernel"
        cause = f"{unit.label}: {killer} killed a process for its memory: {line}"
        return match_unit(unit, cause[:300], 0.97)
    return None


def _exit_match(end: Event) -> Match:
    memory = end["memory"] or {}
    cause = f"{end.where} was {describe_end(None, signal.SIGKILL, memory, end['peak_bytes'] or 0)}"
    return match_exit(end, cause, 0.99, lines=tuple(memory.get("kernel") or ()))
