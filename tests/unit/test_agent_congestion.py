"""Tests the congestion window on simulated connections."""

from __future__ import annotations

import bisect
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from paceline.agent.congestion import MAX_WINDOW, MIN_WINDOW, TARGET_QUEUE_S, CongestionWindow

CONNECTIONS = [  # bytes per second, round-trip time in seconds
    (125e3, 0.001), (125e3, 0.2), (500e3, 0.001), (500e3, 0.2), (2.5e6, 0.001), (2.5e6, 0.2),
]  # fmt: skip


@dataclass
class SimulatedConnection:
    """Simulates a connection with an unlimited buffer and a sender that always has more to send."""

    rate: float
    trip: float
    late: Callable[[float], float] = lambda when: (
        0.0
    )  # extra delay of an acknowledgement in seconds
    stops: tuple[float, float] = (0.0, 0.0)
    bucket: float = 0.0  # burst size in bytes
    pace: CongestionWindow = field(default_factory=CongestionWindow)
    sent: int = 0
    queues: list[tuple[float, float]] = field(default_factory=list)  # (time, queue in seconds)

    def run(self, seconds: float) -> None:
        now, free = 0.0, 0.0
        answers: list[tuple[float, int]] = []
        while now < seconds:
            while self.pace.has_room:
                size = self.pace.piece
                self.pace.sent(size, now, has_backlog=True)
                start = max(free, now)
                if self.stops[0] <= start < self.stops[1]:
                    start = self.stops[1]
                at_once = min(self.bucket, size)
                self.bucket -= at_once
                free = start + (size - at_once) / self.rate
                self.queues.append((now, free - now))
                arrival = free + self.trip
                heapq.heappush(answers, (arrival + self.late(arrival), size))
            when, size = heapq.heappop(answers)
            now = max(now, when)
            self.sent += size
            self.pace.acknowledge(1, now)

    def longest(self, since: float) -> float:
        return max(queue for when, queue in self.queues if when >= since)


@pytest.mark.parametrize(("rate", "trip"), CONNECTIONS)
def test_uses_full_rate_with_short_queue(rate: float, trip: float) -> None:
    connection = SimulatedConnection(rate, trip)
    connection.run(20)
    assert connection.sent / rate / 20 > 0.85
    assert connection.longest(since=0) < 1.0
    assert connection.longest(since=4) < 5 * TARGET_QUEUE_S + trip
    assert (connection.pace.rate or 0) == pytest.approx(rate, rel=0.5)


def test_fast_connection_reaches_max_window() -> None:
    connection = SimulatedConnection(125e6, 0.001)
    connection.run(3)
    assert connection.sent / 125e6 / 3 > 0.9
    assert connection.pace.window == MAX_WINDOW


def test_burst_is_not_mistaken_for_rate() -> None:
    connection = SimulatedConnection(500e3, 0.001, bucket=200_000)
    connection.run(10)
    assert connection.longest(since=0) < 1.0


def test_jitter_does_not_stall_sending() -> None:
    rng = random.Random(1)
    connection = SimulatedConnection(500e3, 0.001, late=lambda when: rng.choice([0.0, 0.02, 0.1]))
    connection.run(20)
    assert connection.sent / 500e3 / 20 > 0.6
    assert connection.longest(since=0) < 1.0


@pytest.mark.parametrize(("period", "min_usage"), [(0.1, 0.6), (0.3, 0.2)])
def test_rarely_scheduled_peer_fills_connection(period: float, min_usage: float) -> None:
    """Most delays are due to a busy CPU, and a smaller window would not shorten them."""
    rng = random.Random(1)
    wakes = [0.0]
    while wakes[-1] < 60:
        wakes.append(wakes[-1] + rng.expovariate(1 / period))

    def late(when: float) -> float:
        return wakes[bisect.bisect(wakes, when)] - when if rng.random() < 0.7 else 0.0

    connection = SimulatedConnection(500e3, 0.001, late=late)
    connection.run(20)
    assert connection.sent / 500e3 / 20 > min_usage
    assert connection.longest(since=4) < 3.0


@pytest.mark.parametrize(("rate", "trip"), CONNECTIONS)
def test_recovers_from_stalled_connection(rate: float, trip: float) -> None:
    connection = SimulatedConnection(rate, trip, stops=(5.0, 10.0))
    connection.run(25)
    assert connection.sent / rate / 20 > 0.8  # of the time in which it was not stalled
    assert connection.longest(since=14) < 1.0


def test_idle_connection_gives_no_rate_estimate() -> None:
    pace = CongestionWindow()
    for second in range(100):
        pace.sent(60, second, has_backlog=False)
        pace.acknowledge(1, second + 0.5)
    assert pace.rate is None
    assert pace.in_flight == 0
    assert pace.window >= MIN_WINDOW
    pace.acknowledge(5, 101.0)  # more frames than are in flight
    assert pace.in_flight == 0
