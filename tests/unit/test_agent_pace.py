"""How much is under way on a line, on simulated ones."""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from paceline.agent.congestion import MAX_WINDOW, MIN_WINDOW, TARGET_QUEUE_S, CongestionWindow

LINES = [  # bytes a second, seconds of a round trip
    (125e3, 0.001), (125e3, 0.2), (500e3, 0.001), (500e3, 0.2), (2.5e6, 0.001), (2.5e6, 0.2),
]  # fmt: skip


@dataclass
class Line:
    """A line with an endless buffer in front of it, and somebody who always has more to send."""

    rate: float
    trip: float
    late: Callable[[float], float] = lambda when: (
        0.0
    )  # how much later than by the line an answer comes
    stops: tuple[float, float] = (0.0, 0.0)
    bucket: float = 0.0  # bytes that pass at once
    pace: CongestionWindow = field(default_factory=CongestionWindow)
    sent: int = 0
    queues: list[tuple[float, float]] = field(default_factory=list)  # when, its length in seconds

    def run(self, seconds: float) -> None:
        now, free = 0.0, 0.0
        answers: list[tuple[float, int]] = []
        while now < seconds:
            while self.pace.has_room:
                size = self.pace.piece
                self.pace.sent(size, now, has_backlog=True)
                begun = max(free, now)
                if self.stops[0] <= begun < self.stops[1]:
                    begun = self.stops[1]
                at_once = min(self.bucket, size)
                self.bucket -= at_once
                free = begun + (size - at_once) / self.rate
                self.queues.append((now, free - now))
                back = free + self.trip
                heapq.heappush(answers, (back + self.late(back), size))
            when, size = heapq.heappop(answers)
            now = max(now, when)
            self.sent += size
            self.pace.acknowledge(1, now)

    def longest(self, since: float) -> float:
        return max(queue for when, queue in self.queues if when >= since)


@pytest.mark.parametrize(("rate", "trip"), LINES)
def test_a_line_is_full_and_its_queue_short(rate: float, trip: float) -> None:
    line = Line(rate, trip)
    line.run(20)
    assert line.sent / rate / 20 > 0.85
    assert line.longest(since=0) < 1.0
    assert line.longest(since=4) < 5 * TARGET_QUEUE_S + trip
    assert (line.pace.rate or 0) == pytest.approx(rate, rel=0.5)


def test_a_fast_line_is_not_held_up() -> None:
    line = Line(125e6, 0.001)
    line.run(3)
    assert line.sent / 125e6 / 3 > 0.9
    assert line.pace.window == MAX_WINDOW


def test_what_passes_at_once_is_not_the_lines_rate() -> None:
    line = Line(500e3, 0.001, bucket=200_000)
    line.run(10)
    assert line.longest(since=0) < 1.0


def test_answers_that_come_late_for_other_reasons_do_not_stop_it() -> None:
    chance = random.Random(1)
    line = Line(500e3, 0.001, late=lambda when: chance.choice([0.0, 0.02, 0.1]))
    line.run(20)
    assert line.sent / 500e3 / 20 > 0.6
    assert line.longest(since=0) < 1.0


@pytest.mark.parametrize(("period", "least"), [(0.1, 0.6), (0.3, 0.2)])
def test_processes_that_seldom_run_fill_a_line_all_the_same(period: float, least: float) -> None:
    """Most answers come when somebody gets a CPU again: less under way would not help that."""
    chance = random.Random(1)
    wakes = [0.0]
    while wakes[-1] < 60:
        wakes.append(wakes[-1] + chance.expovariate(1 / period))

    def late(when: float) -> float:
        return wakes[bisect.bisect(wakes, when)] - when if chance.random() < 0.7 else 0.0

    line = Line(500e3, 0.001, late=late)
    line.run(20)
    assert line.sent / 500e3 / 20 > least
    assert line.longest(since=4) < 3.0


@pytest.mark.parametrize(("rate", "trip"), LINES)
def test_a_line_that_stops_for_a_while(rate: float, trip: float) -> None:
    line = Line(rate, trip, stops=(5.0, 10.0))
    line.run(25)
    assert line.sent / rate / 20 > 0.8  # of the time in which it carried anything
    assert line.longest(since=14) < 1.0


def test_nothing_is_learnt_from_a_line_that_is_hardly_used() -> None:
    pace = CongestionWindow()
    for second in range(100):
        pace.sent(60, second, has_backlog=False)
        pace.acknowledge(1, second + 0.5)
    assert pace.rate is None
    assert pace.in_flight == 0
    assert pace.window >= MIN_WINDOW
    pace.acknowledge(5, 101.0)  # more than is under way: counted elsewhere
    assert pace.in_flight == 0
