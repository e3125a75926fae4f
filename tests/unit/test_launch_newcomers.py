"""Tests what happens to newcomers that start slowly or hang before they join."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.launch.health import newcomers
from paceline.launch.health.heartbeats import MIN_HANG_LIMIT_S, MIN_IDLE_S
from paceline.launch.health.newcomers import Newcomer, NewcomerWatch, StartDurations
from paceline.spec.events import Event

SLEEP_LINE = 'File "/home/me/train.py", line 14 in <module>'
NEXT_LINE = 'File "/home/me/train.py", line 15 in <module>'


def test_start_limit_follows_slowest_start() -> None:
    starts = StartDurations()
    assert starts.slow_after_s(5.0) == starts.limit_s(5.0) == math.inf  # no durations known yet
    starts.on_event(Event("rank started", "n1", 0), 10.0)
    starts.on_event(Event("rank started", "n2", 1), 10.0)
    starts.on_event(Event("recoverable", "n1", 0), 12.0)
    starts.on_event(Event("rank ended", "n2", 1), 90.0)
    starts.on_event(Event("rank started", "n2", 1), 100.0)
    assert (starts.slow_after_s(None), starts.limit_s(None)) == (MIN_IDLE_S, MIN_HANG_LIMIT_S)
    assert (starts.slow_after_s(5.0), starts.limit_s(5.0)) == (4.0, 5.0)
    assert (starts.slow_after_s(0.0), starts.limit_s(0.0)) == (MIN_IDLE_S, math.inf)
    starts.on_event(Event("newcomer ready", "n2", 1), 120.0)
    assert (starts.slow_after_s(None), starts.limit_s(None)) == (40.0, 100.0)
    assert starts.limit_s(5.0) == 40.0


@dataclass
class Scene:
    """Simulates a newcomer on a host where another rank trains.

    Attributes:
        lines: Position of the newcomer in successive inspections; it stays at the last one.
        works: Whether the newcomer uses a CPU.
        told, over: Reports of the watch.
    """

    lines: list[str]
    works: bool = False
    told: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    looks: int = 0

    async def request(self, op: str, **_: Any) -> dict[str, Any]:
        line = self.lines[min(self.looks, len(self.lines) - 1)]
        self.looks += op == "seen"
        cpu_s = float(self.looks * self.works)
        newcomer = {"rank": 1, "state": "S", "cpu_s": cpu_s, "pid": 7, "moved": 0, "sent": 0,
                    "switches": 0, "call": "clock_nanosleep", "on": "", "readers": [],
                    "children": [], "calls": [], "unfinished": "", "stack": [line]}  # fmt: skip
        return {"ranks": [{**newcomer, "rank": 0, "cpu_s": 9.0 * self.looks}, newcomer]}

    async def play(self, looks: int) -> None:
        """Runs the watch for this number of inspections, or until the newcomer is ended."""
        node = SimpleNamespace(name="n1", lost=False, running=True, channel=self)
        started = time.monotonic() - 60.0
        starting: list[Newcomer] = [(1, "n1", started)]

        def over(slot: int, host: str, seconds: float, location: str) -> None:
            self.over.append(location)
            starting.clear()

        def told(slot: int, host: str, seconds: float, location: str) -> None:
            self.told.append(location)

        fleet: Any = SimpleNamespace(nodes=[node])
        watch = NewcomerWatch(fleet, lambda: starting, told, over, None)
        watch.durations.slowest_s = 1.0
        watching = asyncio.ensure_future(watch.run())
        deadline = time.monotonic() + 30
        while self.looks < looks and not self.over:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REINSPECT_S", "SNAPSHOT_GAP_S"):
        monkeypatch.setattr(newcomers, name, 0.0)
    monkeypatch.setattr(newcomers, "POLL_S", 0.005)


def test_sleeping_newcomer_is_reported_once_and_ended() -> None:
    scene = Scene([SLEEP_LINE])
    asyncio.run(scene.play(100))
    assert scene.told == scene.over == ["is stuck at train.py, line 14 (it sleeps)"]


@pytest.mark.parametrize(
    "scene",
    [Scene([SLEEP_LINE], works=True), Scene([SLEEP_LINE, NEXT_LINE] * 20)],
    ids=["works", "moves"],
)
def test_slow_newcomer_is_not_reported(scene: Scene) -> None:
    asyncio.run(scene.play(20))
    assert scene.told == scene.over == []
