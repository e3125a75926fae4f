"""The job hung and was stopped for that reason, or its collectives timed out."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.spec.events import Event
from paceline.spec.failure import COLLECTIVE_TIMEOUT, UNFREED, Failure

_REMEDY_UNFREED = (
    "Look for why that rank was lost: in its log, and in the kernel log of its host. The script"
    " need not change; --max-restarts 1 continues such a job from its newest checkpoint."
)
_HANG_KINDS = ("started", "hang", "hang over")


def match(evidence: Evidence) -> Match | None:
    failure = evidence.first_failure
    if failure is None:
        return None
    if failure.kind == "hang":
        subject = failure.where if failure.rank is not None else "the job"
        hosts = (failure.host,) if failure.rank is not None else ()
        remedy = _REMEDY_UNFREED if failure.headline.startswith(UNFREED) else ""
        cause = f"{subject} {failure.headline}"
        return Match(cause, hosts, failure.rank, 0.98, remedy=remedy)
    hang = unresolved_hang(evidence.events)
    if hang is None or not _has_timed_out(failure):
        return None
    return Match(describe(hang), (hang.host,) if hang.host else (), hang.rank, 0.99)


def unresolved_hang(events: Sequence[Event]) -> Event | None:
    """The hang that was reported while the job ran, if the job did not continue after it."""
    last = next((event for event in reversed(events) if event.kind in _HANG_KINDS), None)
    return last if last is not None and last.kind == "hang" else None


def describe(hang: Event) -> str:
    """The sentence that was shown while the job ran."""
    return f"the job hung: {hang['text'] or ''}"


def _has_timed_out(failure: Failure) -> bool:
    return failure.is_secondary and bool(COLLECTIVE_TIMEOUT.search(failure.headline))
