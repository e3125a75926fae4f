"""The job hung and was stopped for that reason, or its collectives timed out."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event
from paceline.spec.failure import COLLECTIVE_TIMEOUT, UNFREED, Failure

_REMEDY_UNFREED = (
    "Look for why that rank was lost: in its log, and in the kernel log of its host. The script"
    " need not change; --max-restarts 1 continues such a job from its newest checkpoint."
)
_REMEDY_CHILDREN = (
    "Give each process that the script starts a rank of its own in the whole job:"
    " RANK * nprocs + its number, of WORLD_SIZE * nprocs. Or let Paceline start the processes:"
    " leave out mp.spawn, and use -p N for N ranks on each host."
)
_CHILDREN_WAIT = re.compile(r"processes that (?:they|it) started\b.* waits in init_process_group ")
_HANG_KINDS = ("started", "hang", "hang over")


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    if failure is None:
        return None
    if failure.kind == "hang":
        subject = failure.where if failure.rank is not None else "the job"
        hosts = (failure.host,) if failure.rank is not None else ()
        remedy = remedy_for(failure.headline)
        remedy = _REMEDY_UNFREED if failure.headline.startswith(UNFREED) else remedy
        cause = f"{subject} {failure.headline}"
        return Match(cause, hosts, failure.rank, 0.98, remedy=remedy)
    hang = unresolved_hang(evidence.events)
    if hang is None or not _has_timed_out(failure):
        return None
    return Match(describe(hang), (hang.host,) if hang.host else (), hang.rank, 0.99)


def unresolved_hang(events: Sequence[Event]) -> Event | None:
    """The hang that was reported while the job ran, if the job did not continue after it."""
    hang_event = next((event for event in reversed(events) if event.kind in _HANG_KINDS), None)
    return hang_event if hang_event is not None and hang_event.kind == "hang" else None


def describe(hang: Event) -> str:
    """The sentence that was shown while the job ran."""
    return f"the job hung: {hang['text'] or ''}"


def remedy_for(text: str) -> str:
    """The remedy if a hang's text shows that processes of the ranks do not meet; else empty."""
    return _REMEDY_CHILDREN if _CHILDREN_WAIT.search(text) else ""


def _has_timed_out(failure: Failure) -> bool:
    return failure.is_secondary and bool(COLLECTIVE_TIMEOUT.search(failure.headline))
