"""Newcomers that do not come as far as joining: noticed by how long the first ranks took to start.

Nobody waits for such a process, so nothing shows that it hangs but the time: it sleeps, or waits
for a lock that its predecessor held, before ``train.join``. One that works is let be: on another
disk, or on a machine that has more to do by now, a start may take longer than the first one did.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.launch.health.hang_verdict import Look, stands_still
from paceline.launch.health.hangs import AGAIN_S, BETWEEN_S, LOOK_S, looks_at_host
from paceline.launch.health.heartbeats import LEAST_LIMIT_S, LEAST_S, LIMIT_GAPS
from paceline.launch.nodes.fleet import Fleet
from paceline.spec.events import Event

USUAL_STARTS = 2  # as many times the slowest start that was seen are nothing to look at

Starting = tuple[int, str, float]  # slot, host, when it was started


class Starts:
    """How long ranks take until they are ready to train. Pure."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self.slowest_s: float | None = None

    def heard(self, event: Event, now: float) -> None:
        """What an agent or a rank says."""
        if event.rank is None:
            return
        if event.kind == "rank started":
            self._since[event.rank] = now
        elif event.kind in ("recoverable", "newcomer ready"):
            if (since := self._since.pop(event.rank, None)) is not None:
                self.slowest_s = max(now - since, self.slowest_s or 0.0)
        elif event.kind == "rank ended":
            self._since.pop(event.rank, None)

    def told_s(self, limit_s: float | None) -> float:
        """Seconds after which one that is not there is looked at; infinite where nothing is known.

        Args:
            limit_s: As ``--hang-timeout`` has it; ``None``: measured, 0: never ended.
        """
        if self.slowest_s is None:
            return math.inf
        return max(USUAL_STARTS * self.slowest_s, min(LEAST_S, (limit_s or math.inf) / 2))

    def limit_s(self, limit_s: float | None) -> float:
        """Seconds after which it is ended; infinite where it never is."""
        if self.slowest_s is None or limit_s == 0:
            return math.inf
        if limit_s is None:
            return max(LEAST_LIMIT_S, LIMIT_GAPS * self.slowest_s)
        return max(limit_s, USUAL_STARTS * self.slowest_s)


@dataclass(slots=True)
class _Late:
    """What is known of one start."""

    started: float
    next_look: float = 0.0
    told: bool = False
    still: bool = False  # at the last look


class LateStartWatch:
    """Looks every second for newcomers that are late, and tells what they stand in.

    Args:
        fleet: The nodes.
        starting: The newcomers that cannot join yet.
        told: Called with each that stands still: slot, host, seconds since its start, and where.
        over: Called with the same of one that has done so for too long: it is to be ended.
        limit_s: How long that is; ``None``: measured; 0: never.
    """

    def __init__(self, fleet: Fleet, starting: Callable[[], Sequence[Starting]],
                 on_late: Callable[[int, str, float, str], None],
                 on_too_late: Callable[[int, str, float, str], None],
                 limit_s: float | None) -> None:  # fmt: skip
        self.starts = Starts()
        self._fleet, self._starting = fleet, starting
        self._told, self._over, self._limit_s = on_late, on_too_late, limit_s
        self._late: dict[int, _Late] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for newcomer in self._due():
                await self._look(*newcomer)

    def _due(self) -> list[Starting]:
        now, due = time.monotonic(), []
        starting = self._starting()
        known = {slot: self._late.get(slot) for slot, _, _ in starting}
        self._late = {}
        for slot, host, started in starting:
            late = known[slot]
            if late is None or late.started != started:
                late = _Late(started)
            self._late[slot] = late
            seconds = now - started
            ends = late.still and seconds > self.starts.limit_s(self._limit_s)
            looks = seconds > self.starts.told_s(self._limit_s) and now >= late.next_look
            if ends or looks:
                due.append((slot, host, started))
        return due

    async def _look(self, slot: int, host: str, started: float) -> None:
        """Twice: who has moved in between, or works, is only slow."""
        late = self._late[slot]
        before = await self._at(host, slot)
        looked_at = time.monotonic()
        await asyncio.sleep(BETWEEN_S)
        after = await self._at(host, slot, closely=True)
        now = time.monotonic()
        late.next_look = now + AGAIN_S
        if (slot, host, started) not in self._starting():
            return  # it has come meanwhile
        if before is None or after is None:
            return
        where = stands_still(before, after, now - looked_at)
        before_too, late.still = late.still, bool(where)
        if where and not late.told:
            late.told = True
            self._told(slot, host, now - started, where)
        elif where and before_too and now - started > self.starts.limit_s(self._limit_s):
            self._over(slot, host, self.starts.limit_s(self._limit_s), where)

    async def _at(self, host: str, slot: int, closely: bool = False) -> Look | None:
        looks = await looks_at_host(self._fleet, host, closely)
        return next((look for look in looks or () if look.stand.rank == slot), None)
