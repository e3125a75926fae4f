"""Watches newcomers that take longer to join than the first ranks took to start.

No rank waits for such a process, so only the time shows that it hangs: it sleeps, or waits for a
lock that its predecessor held, before ``train.join``. A newcomer that works is left alone: on
another disk or a busier machine a start may take longer than the first one did.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.launch.health.hang_verdict import RankSnapshot, describe_stall
from paceline.launch.health.hangs import POLL_S, REINSPECT_S, SNAPSHOT_GAP_S, inspect_host
from paceline.launch.health.heartbeats import HANG_GAP_FACTOR, MIN_HANG_LIMIT_S, MIN_IDLE_S
from paceline.launch.nodes.fleet import Fleet
from paceline.spec.events import Event

START_TIME_FACTOR = 2  # times the slowest start, before a newcomer is inspected

Newcomer = tuple[int, str, float]  # slot, host, when it was started


class StartDurations:
    """Measures how long ranks take until they are ready to train. Pure."""

    def __init__(self) -> None:
        self._started_at: dict[int, float] = {}
        self.slowest_s: float | None = None

    def on_event(self, event: Event, timestamp: float) -> None:
        """Handles an event of an agent or a rank."""
        if event.rank is None:
            return
        if event.kind == "rank started":
            self._started_at[event.rank] = timestamp
        elif event.kind in ("recoverable", "newcomer ready"):
            if (started_at := self._started_at.pop(event.rank, None)) is not None:
                self.slowest_s = max(timestamp - started_at, self.slowest_s or 0.0)
        elif event.kind == "rank ended":
            self._started_at.pop(event.rank, None)

    def slow_after_s(self, limit_s: float | None) -> float:
        """Returns the seconds before a newcomer is inspected; infinite if no start was measured."""
        if self.slowest_s is None:
            return math.inf
        return max(START_TIME_FACTOR * self.slowest_s, min(MIN_IDLE_S, (limit_s or math.inf) / 2))

    def limit_s(self, limit_s: float | None) -> float:
        """Returns the seconds after which a newcomer is ended; infinite for never."""
        if self.slowest_s is None or limit_s == 0:
            return math.inf
        if limit_s is None:
            return max(MIN_HANG_LIMIT_S, HANG_GAP_FACTOR * self.slowest_s)
        return max(limit_s, START_TIME_FACTOR * self.slowest_s)


@dataclass(slots=True)
class _PendingStart:
    """The start of one newcomer."""

    started: float
    inspect_at: float = 0.0
    is_reported: bool = False
    is_stalled: bool = False  # in the latest snapshots


class NewcomerWatch:
    """Checks every second for newcomers that are late, and reports where they stand.

    Args:
        starting: The newcomers that cannot join yet.
        on_stall: Called with a newcomer that is stuck: slot, host, seconds since its start,
            and its position.
        on_timeout: Called with the same for a newcomer that exceeds the limit; it must be ended.
        limit_s: Seconds that a start may take; ``None`` to measure them; 0 for no limit.
    """

    def __init__(self, fleet: Fleet, starting: Callable[[], Sequence[Newcomer]],
                 on_stall: Callable[[int, str, float, str], None],
                 on_timeout: Callable[[int, str, float, str], None],
                 limit_s: float | None) -> None:  # fmt: skip
        self.durations = StartDurations()
        self._fleet, self._starting = fleet, starting
        self._on_stall, self._on_timeout, self._limit_s = on_stall, on_timeout, limit_s
        self._pending: dict[int, _PendingStart] = {}

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            for newcomer in self._overdue():
                await self._inspect(*newcomer)

    def _overdue(self) -> list[Newcomer]:
        timestamp, overdue = time.monotonic(), []
        starting = self._starting()
        previous = {slot: self._pending.get(slot) for slot, _, _ in starting}
        self._pending = {}
        for slot, host, started in starting:
            start = previous[slot]
            if start is None or start.started != started:
                start = _PendingStart(started)
            self._pending[slot] = start
            seconds = timestamp - started
            is_expired = start.is_stalled and seconds > self.durations.limit_s(self._limit_s)
            is_slow = seconds > self.durations.slow_after_s(self._limit_s)
            if is_expired or (is_slow and timestamp >= start.inspect_at):
                overdue.append((slot, host, started))
        return overdue

    async def _inspect(self, slot: int, host: str, started: float) -> None:
        """Takes two snapshots; a newcomer that has moved in between, or works, is only slow."""
        start = self._pending[slot]
        first = await self._snapshot(host, slot)
        taken_at = time.monotonic()
        await asyncio.sleep(SNAPSHOT_GAP_S)
        second = await self._snapshot(host, slot, closely=True)
        timestamp = time.monotonic()
        start.inspect_at = timestamp + REINSPECT_S
        if (slot, host, started) not in self._starting():
            return  # it has come meanwhile
        if first is None or second is None:
            return
        position = describe_stall(first, second, timestamp - taken_at)
        was_stalled, start.is_stalled = start.is_stalled, bool(position)
        limit_s = self.durations.limit_s(self._limit_s)
        if position and not start.is_reported:
            start.is_reported = True
            self._on_stall(slot, host, timestamp - started, position)
        elif position and was_stalled and timestamp - started > limit_s:
            self._on_timeout(slot, host, limit_s, position)

    async def _snapshot(self, host: str, slot: int, closely: bool = False) -> RankSnapshot | None:
        snapshots = await inspect_host(self._fleet, host, closely)
        return next((snapshot for snapshot in snapshots or () if snapshot.stack.rank == slot), None)
