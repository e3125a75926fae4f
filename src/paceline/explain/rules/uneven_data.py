"""One rank had fewer steps than the others."""

from __future__ import annotations

import re
from signal import SIGTERM

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event
from paceline.spec.failure import PEER_LOST

CLOCK_TOLERANCE_S = 0.5  # between two hosts' times of one moment
_STEP = re.compile(r"(?i)\bstep\D{0,3}(\d+)")


def match(evidence: Evidence) -> Match | None:
    early = _early_exit(evidence)
    waiting = next(evidence.search(PEER_LOST), None)
    if early is None or waiting is None:
        return None
    log, index, _ = waiting
    if (log.host, log.rank) == (early.host, early.rank):
        return None
    last_step = _last_step(evidence, early)
    step_text = f" after step {last_step}" if last_step else ""
    cause = f"{early.where} ended its work{step_text} while {log.label} still waited for it"
    return Match(cause, (early.host,), early.rank, 0.93, log.lines[index : index + 1])


def _early_exit(evidence: Evidence) -> Event | None:
    """The first rank that ended well, or left its group, before the first one failed."""
    failure_times = [end.time for end in evidence.exits if end["code"] != 0]
    if not failure_times:
        return None
    # ranks that join a job that is over also exit with status 0
    deadline = min(failure_times) + CLOCK_TOLERANCE_S
    clean_exits = [end for end in evidence.exits if end["code"] == 0]
    return next(
        (event for event in [*clean_exits, *_group_leaves(evidence)] if event.time < deadline), None
    )


def _group_leaves(evidence: Evidence) -> list[Event]:
    """Events of ranks that destroyed their group and did not fail by themselves."""
    last_events = {e.rank: e for e in evidence.events if e.kind in ("world joined", "world left")}
    intended = {end.rank for end in evidence.exits if end["code"] == 0 or end["signal"] == SIGTERM}
    raised = {e.rank for e in evidence.events if e.kind == "exception"}
    return [event for rank, event in last_events.items()
            if event.kind == "world left" and rank in intended - raised]  # fmt: skip


def _last_step(evidence: Evidence, end: Event) -> str:
    logs = [log for log in evidence.logs if (log.host, log.rank) == (end.host, end.rank)]
    steps = [match[1] for log in logs for line in log.lines if (match := _STEP.search(line))]
    return steps[-1] if steps else ""
