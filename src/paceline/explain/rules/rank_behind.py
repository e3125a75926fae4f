"""A rank did not launch a collective that others waited for, by NCCL's watchdogs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_unit
from paceline.explain.units import Unit
from paceline.spec.failure import format_location

MIN_WAITING = 3  # ranks that show which of them is the outlier
MAX_STEPS_BEHIND = 3
_WAITED = re.compile(
    r"\[Rank (?P<rank>\d{1,9})\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d{1,18}), OpType=(?P<operation>\w{1,40})"
)
_POSITION = re.compile(
    r"Rank (?P<rank>\d{1,9})\].{0,400}?[Ll]ast enqueued (?:NCCL )?work: (?P<number>-?\d{1,18})"
)


@dataclass(frozen=True, slots=True)
class _Wait:
    """The collective in which a rank waited in vain."""

    unit: Unit
    number: int
    operation: str


def match(evidence: Evidence) -> Match | None:
    waits: dict[int, _Wait] = {}
    for unit, found in evidence.search(_WAITED):
        wait = _Wait(unit, int(found["number"]), found["operation"])
        waits.setdefault(int(found["rank"]), wait)
    if not waits:
        return None
    return _operations_match(waits) or _out_of_step(waits) or _behind_match(evidence, waits)


def _operations_match(waits: Mapping[int, _Wait]) -> Match | None:
    """Ranks that waited in different collectives with the same number."""
    rank, first = min(waits.items())
    for other, wait in sorted(waits.items()):
        if wait.number == first.number and wait.operation != first.operation:
            where = (format_location(first.unit.host, rank), format_location(wait.unit.host, other))
            cause = (
                f"ranks called different collectives: number {first.number} was"
                f" {first.operation} on {where[0]} and {wait.operation} on {where[1]}"
            )
            return match_unit(wait.unit, cause, 0.95)
    return None


def _out_of_step(waits: Mapping[int, _Wait]) -> Match | None:
    """One rank that waited in a collective that all others had behind them.

    Groups count their collectives separately, so only close numbers are of one group.
    """
    last = max(wait.number for wait in waits.values())
    behind = {rank: wait for rank, wait in waits.items() if wait.number < last}
    if len(behind) != 1 or len(waits) < MIN_WAITING:
        return None
    (rank, wait), others = *behind.items(), [w for w in waits.values() if w.number == last]
    if last - wait.number > MAX_STEPS_BEHIND or others[0].operation == wait.operation:
        return None
    cause = (
        f"{format_location(wait.unit.host, rank)} called other collectives than the rest: it waited"
        f" in number {wait.number} ({wait.operation}), the others in number {last}"
        f" ({others[0].operation})"
    )
    return match_unit(wait.unit, cause, 0.8)


def _behind_match(evidence: Evidence, waits: Mapping[int, _Wait]) -> Match | None:
    """Ranks whose last collective comes before the one that others waited in."""
    waiting_rank, wait = min(waits.items(), key=lambda item: item[1].number)
    positions = {int(found["rank"]): (int(found["number"]), unit)
                 for unit, found in evidence.search(_POSITION)}  # fmt: skip
    behind = {rank: unit for rank, (number, unit) in positions.items() if number < wait.number}
    silent = evidence.outcome.ranks - positions.keys() - waits.keys()
    if not behind and len(silent) != 1:
        return None
    rank = min(behind or silent)
    host = behind[rank].host if behind else ""
    more = f" (nor did {len(behind) - 1} others)" if len(behind) > 1 else ""
    action = "did not launch" if behind else "reported nothing about"
    cause = (
        f"{format_location(host, rank)} {action} the collective that rank {waiting_rank} waited for"
        f" ({wait.operation}, number {wait.number}){more}"
    )
    found = match_unit(wait.unit, cause, 0.9 if behind else 0.6)
    return Match(
        cause, (host,) if host else (), rank, found.confidence, found.lines, unit=wait.unit
    )
