"""A rank did not come to a collective: it was busy elsewhere, or stopped."""

from __future__ import annotations

from paceline.explain import stacks
from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.explain.stacks import Stand
from paceline.spec.failure import WAITED

_STATES = {"T": "is stopped (SIGSTOP, or Ctrl-Z)", "D": "waits for a disk or a network folder"}


def match(evidence: Evidence) -> Match | None:
    waiting = next(evidence.search(WAITED), None)
    if waiting is None:
        return None
    victims = {log.rank for log, _, _ in evidence.search(WAITED)}
    alive = [stand for stand in stacks.seen(evidence) if stand.rank not in victims]
    absent = [stand for stand in alive if doing(stand)]
    if not absent:
        return None
    first, log = absent[0], waiting[0]
    cause = f"{first.who} {doing(first)} while {log.where} waited for it in vain"
    lines = tuple(f'File "{f.file}", line {f.line} in {f.function}' for f in first.frames[:5])
    return Match(cause, (first.host,), None, 0.95, lines, remedy=_remedy(first))


def doing(stand: Stand) -> str:
    """What it did instead of the collective; empty when it waited, too, or nothing is known."""
    if stand.state in _STATES:
        return _STATES[stand.state]
    if stacks.waits(stand) or stand.own is None:
        return ""
    function = "" if stand.own.function == "<module>" else f"in {stand.own.function}, "
    return f"was {function or 'at '}{stand.own.where}"


def _remedy(stand: Stand) -> str:
    if stand.state == "T":
        return f"Find out who stops processes on {stand.host} (a debugger, kill -STOP), run again"
    return ""
