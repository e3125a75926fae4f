"""A rank was killed from outside."""

from __future__ import annotations

import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_exit, match_unit
from paceline.spec.events import Event
from paceline.spec.failure import WORKER_GONE, Failure, describe_end

_CONFIRM = "On {host}: `journalctl` around that time; the scheduler's accounting (`sacct -j JOB`)."
_REMEDY = (
    "Ask who ends processes on {host}: a person, a cron job, another user's "
    "clean-up script, a scheduler or container runtime at its limit."
)
_NOT_MEMORY = " It was not the kernel's OOM killer: that killed nothing there."
_WORKER_KILLED = "is killed by signal: Killed"  # torch's message about a DataLoader worker

_WORKER_CONFIDENCE = 0.7  # more than the exception that the rank raises because of it


def match(evidence: Evidence) -> Match | None:
    """A process that SIGKILL ended, or a SIGTERM which Paceline had not sent."""
    first = evidence.first_failure
    if (
        first is not None
        and first.kind == "exception"
        and (ended := _end_of_worker(first.traceback))
    ):
        cause = f"a DataLoader worker of {first.where} {ended}"
        return Match(cause, (first.host,), first.rank, _WORKER_CONFIDENCE)
    if first is not None and first.kind not in ("signal", "exit"):
        return None
    if first is not None and first.was_terminated:
        return _request_match(first)
    if first is None and evidence.result.interrupted:
        return None  # Paceline ended what had not ended within the grace period
    for end in evidence.exits:
        is_first = first is None or (end.host, end.rank) == (first.host, first.rank)
        if end["signal"] == signal.SIGKILL and is_first:
            confirm, remedy = _exclude_oom_killer(end)
            cause = f"{end.where} was {describe_end(None, signal.SIGKILL, end['memory'])}"
            return match_exit(end, cause, 0.6, remedy=remedy, confirm=confirm)
    if not evidence.exits and not evidence.events:
        for unit in evidence.outcome.failures:
            if worker_end := _end_of_worker("\n".join(unit.lines)):
                cause = f"a DataLoader worker of {unit.label} {worker_end}"
                return match_unit(unit, cause, _WORKER_CONFIDENCE)
            if any(end.signal == signal.SIGKILL for end in unit.exits):
                cause = f"{unit.label} was {describe_end(None, signal.SIGKILL)}"
                return match_unit(unit, cause, 0.6)
    return None


def _end_of_worker(text: str) -> str:
    """Returns how a DataLoader worker ended, by a message of its rank; empty if it did not."""
    if _WORKER_KILLED in text:
        return f"was {describe_end(None, signal.SIGKILL)}"
    return "ended while the rank read a batch from it" if WORKER_GONE.search(text) else ""


def _request_match(failure: Failure) -> Match:
    """The match of a rank or host that SIGTERM ended first; Paceline had not sent it."""
    cause = f"{failure.where} was {failure.headline}"
    confirm, remedy = _CONFIRM.format(host=failure.host), _REMEDY.format(host=failure.host)
    return Match(cause, (failure.host,), failure.rank, 0.8, remedy=remedy, confirm=confirm)


def _exclude_oom_killer(end: Event) -> tuple[str, str]:
    """Texts for confirm and remedy if the kernel reports that it killed nothing."""
    memory = end["memory"] or {}
    if memory.get("kills") != 0 or memory.get("kernel"):
        return "", ""
    return _CONFIRM.format(host=end.host) + _NOT_MEMORY, _REMEDY.format(host=end.host)
