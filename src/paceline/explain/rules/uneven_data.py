"""One rank had fewer steps than the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from signal import SIGTERM

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit
from paceline.spec.events import Event
from paceline.spec.failure import PEER_LOST

CLOCK_TOLERANCE_S = 0.5  # between two hosts' times of one moment
_RESTART_REMEDY = (
    "All ranks had been started again. All of them must load the same checkpoint: save it on a disk"
    " that all hosts share, or on every host (where `LOCAL_RANK` is 0), or use `paceline.train`,"
    " which sends it. If the data is uneven, use `DataLoader(data, drop_last=True)`,"
    " `DistributedSampler(data)`, or torch's `Join([model])` context."
)
_CONNECTION_LOST = re.compile(r"Connection (?:closed|reset) by (?:remote )?peer")
_STEP = re.compile(r"(?i)\bstep\D{0,3}(\d+)")


def match(evidence: Evidence) -> Match | None:
    # ranks that did not load the same checkpoint have different numbers of steps left
    return None if evidence.replica_difference else match_early_end(evidence)


def match_early_end(evidence: Evidence) -> Match | None:
    """The match of a rank that ended its work while others waited for it, for whatever reason."""
    early = _early_exit(evidence.last_attempt)
    if early is None:
        return _recorded_match(evidence) or _log_match(evidence)
    # it may have lost a connection itself after its work
    waiting = (match for match in evidence.search(PEER_LOST)
               if (match[0].host, match[0].rank) != (early.host, early.rank))  # fmt: skip
    unit, _ = next(waiting, (None, None))
    if unit is None:
        return _recorded_match(evidence)
    last_step = _last_step(evidence, early)
    step_text = f" after step {last_step}" if last_step else ""
    frame = unit.errors[-1].script_frame if unit.errors else None
    place = f" at {frame.location}" if frame is not None and not frame.is_library else ""
    cause = f"{early.where} ended its work{step_text} while {unit.label} still waited for it{place}"
    lines = tuple(unit.text.splitlines()[:1])
    is_restart = any(event.kind == "started" and event["attempt"] for event in evidence.events)
    remedy = _RESTART_REMEDY if is_restart else ""
    return Match(cause, (early.host,), early.rank, 0.93, lines, remedy)


def _recorded_match(evidence: Evidence) -> Match | None:
    """The match of an end that the launcher recorded as too early."""
    failure = evidence.first_failure
    if failure is None or failure.kind != "early":
        return None
    return Match(f"{failure.where} {failure.headline}", (failure.host,), failure.rank, 0.9)


def _log_match(evidence: Evidence) -> Match | None:
    """A rank that lost its connection although torchrun saw no other failure and stopped nobody."""
    outcome = evidence.outcome
    lost = [unit for unit in outcome.consequences
            if unit.kind == "traceback" and _CONNECTION_LOST.search(unit.text)]  # fmt: skip
    if not lost:
        return None
    is_only = all(
        unit.kind == "exit" and unit.rank in (None, lost[0].rank) for unit in outcome.failures
    )
    if not is_only or not _contains(evidence, "  <NO_OTHER_FAILURES>"):
        return None
    if _contains(evidence, " closing signal SIGTERM"):
        return None
    cause = f"{lost[0].label} still waited for a rank that had ended without an error"
    return match_unit(lost[0], cause, 0.6)


def _contains(evidence: Evidence, words: str) -> bool:
    return any(words in line for log in evidence.logs for line in log.lines)


def _early_exit(events: Sequence[Event]) -> Event | None:
    """The first rank of an attempt that ended well, or left its group, before the first failure."""
    exits = [event for event in events if event.kind == "rank ended"]
    failure_times = [end.time for end in exits if end["code"] != 0]
    if not failure_times:
        return None
    # ranks that join a job that is over also exit with status 0
    deadline = min(failure_times) + CLOCK_TOLERANCE_S
    clean_exits = [end for end in exits if end["code"] == 0]
    candidates = [*clean_exits, *_group_leaves(events, exits)]
    return next((event for event in candidates if event.time < deadline), None)


def _group_leaves(events: Sequence[Event], exits: Sequence[Event]) -> list[Event]:
    """Events of ranks that destroyed their group and did not fail by themselves."""
    last_events = {e.rank: e for e in events if e.kind in ("world joined", "world left")}
    intended = {end.rank for end in exits if end["code"] == 0 or end["signal"] == SIGTERM}
    raised = {e.rank for e in events if e.kind == "exception"}
    return [event for rank, event in last_events.items()
            if event.kind == "world left" and rank in intended - raised]  # fmt: skip


def _last_step(evidence: Evidence, end: Event) -> str:
    logs = [log for log in evidence.logs if (log.host, log.rank) == (end.host, end.rank)]
    steps = [match[1] for log in logs for line in log.lines if (match := _STEP.search(line))]
    return steps[-1] if steps else ""
