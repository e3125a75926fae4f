"""One rank had less to do than the others."""

from __future__ import annotations

import re
from signal import SIGTERM

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event
from paceline.spec.failure import PEER_GONE

APART_S = 0.5  # between two hosts' words of the same moment: their clocks, and busy agents
_STEP = re.compile(r"(?i)\bstep\D{0,3}(\d+)")


def match(evidence: Evidence) -> Match | None:
    early = _ended_well_before_others(evidence)
    waiting = next(evidence.search(PEER_GONE), None)
    if (
        early is None
        or waiting is None
        or (waiting[0].host, waiting[0].rank)
        == (
            early.host,
            early.rank,
        )
    ):
        return None
    where = early.where
    at = _last_step(evidence, early)
    step = f" after step {at}" if at else ""
    cause = f"{where} ended its work{step} while {waiting[0].where} still waited for it"
    return Match(cause, (early.host,), early.rank, 0.93, waiting[0].lines[waiting[1] :][:1])


def _ended_well_before_others(evidence: Evidence) -> Event | None:
    """The first rank that ended well, or left its group, before the first one failed."""
    bad = [end.time for end in evidence.ends if end["code"] != 0]
    if not bad:
        return None
    # Before the first that failed: newcomers to a job that is over end well, too.
    until = min(bad) + APART_S
    good = [end for end in evidence.ends if end["code"] == 0]
    return next((event for event in [*good, *_left(evidence)] if event.time < until), None)


def _left(evidence: Evidence) -> list[Event]:
    """By whom a group was destroyed that then ended well, or only because it was told to."""
    last = {e.rank: e for e in evidence.events if e.kind in ("world joined", "world left")}
    wished = {end.rank for end in evidence.ends if end["code"] == 0 or end["signal"] == SIGTERM}
    raised = {e.rank for e in evidence.events if e.kind == "exception"}
    return [event for rank, event in last.items()
            if event.kind == "world left" and rank in wished - raised]  # fmt: skip


def _last_step(evidence: Evidence, end: Event) -> str:
    logs = [log for log in evidence.logs if (log.host, log.rank) == (end.host, end.rank)]
    steps = [match[1] for log in logs for line in log.lines if (match := _STEP.search(line))]
    return steps[-1] if steps else ""
