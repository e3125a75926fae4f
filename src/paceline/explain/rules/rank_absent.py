"""A rank did not reach a collective, because it was busy or stopped."""

from __future__ import annotations

from paceline.explain import stacks
from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match
from paceline.explain.stacks import RankStack
from paceline.spec.failure import COLLECTIVE_TIMEOUT

_STATES = {"T": "is stopped (SIGSTOP, or Ctrl-Z)", "D": "waits for a disk or a network folder"}


def match(evidence: Evidence) -> Match | None:
    waiting = [unit for unit, _ in evidence.search(COLLECTIVE_TIMEOUT)]
    if not waiting:
        return None
    victims = {unit.rank for unit in waiting}
    others = [stand for stand in stacks.stacks_at_failure(evidence) if stand.rank not in victims]
    absent = [stand for stand in others if describe_activity(stand)]
    if not absent:
        return None
    absent_rank = absent[0]
    activity = describe_activity(absent_rank)
    cause = f"{absent_rank.label} {activity} while {waiting[0].label} waited for it in vain"
    lines = tuple(f'File "{f.file}", line {f.line} in {f.function}' for f in absent_rank.frames[:5])
    return Match(cause, (absent_rank.host,), None, 0.95, lines, remedy=_remedy(absent_rank))


def describe_activity(stack: RankStack) -> str:
    """What a rank did instead of the collective; empty if it waited, too, or nothing is known."""
    if stack.state in _STATES:
        return _STATES[stack.state]
    if stacks.is_waiting(stack) or stack.script_frame is None:
        return ""
    function = (
        "" if stack.script_frame.function == "<module>" else f"in {stack.script_frame.function}, "
    )
    return f"was {function or 'at '}{stack.script_frame.location}"


def _remedy(stack: RankStack) -> str:
    if stack.state == "T":
        who = f"who stops processes on {stack.host} (a debugger, `kill -STOP PID`)"
        return f"Find out {who}, then run again."
    return ""
