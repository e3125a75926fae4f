"""One rank had less to do than the others."""

from __future__ import annotations

import re

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event
from paceline.spec.failure import PEER_GONE

APART_S = 0.5  # between two hosts' words of the same moment: their clocks, and busy agents
_STEP = re.compile(r"(?i)\bstep\D{0,3}(\d+)")


def match(evidence: Evidence) -> Match | None:
    early = _ended_well_before_others(evidence)
    waiting = next(evidence.search(PEER_GONE), None)
    if early is None or waiting is None or evidence.end_of(waiting[0]) == early:
        return None
    where = early.where
    at = _last_step(evidence, early)
    step = f" after step {at}" if at else ""
    cause = f"{where} ended its work{step} while {waiting[0].where} still waited for it"
    return Match(cause, (early.host,), early.rank, 0.93, waiting[0].lines[waiting[1] :][:1])


def _ended_well_before_others(evidence: Evidence) -> Event | None:
    bad = [end.time for end in evidence.ends if end["code"] != 0]
    good = [end for end in evidence.ends if end["code"] == 0]
    # Before the first that failed: newcomers to a job that is over end well, too.
    return next((end for end in good if bad and end.time < min(bad) + APART_S), None)


def _last_step(evidence: Evidence, end: Event) -> str:
    logs = [log for log in evidence.logs if (log.host, log.rank) == (end.host, end.rank)]
    steps = [match[1] for log in logs for line in log.lines if (match := _STEP.search(line))]
    return steps[-1] if steps else ""
