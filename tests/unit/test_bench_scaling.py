"""Tests the evaluation of a scaling benchmark: speed-up, efficiency and limits."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from paceline.bench.scaling import (
    Layout,
    Measurement,
    advice,
    draw,
    format_table,
    ladder,
    limit,
    make_rows,
    measure,
    to_json,
)
from paceline.spec.events import Event


def trained_event(samples: int, seconds: float, data: float, waiting: float, **extra: Any) -> Event:
    """Returns the event that a training sends at its end."""
    parts = {"data": data, "waiting": waiting, "moving": 0.1, "computing": 0.8 - data - waiting}
    fields = {"steps": 100, "samples": samples, "seconds": seconds, "parts": parts}
    return Event("trained", "n1", 0, 108.0, {**fields, **extra})


TRAINED_EVENT = trained_event(76_800, 4.5, data=0.3, waiting=0.05)
STRAGGLER_EVENT = trained_event(
    6_400, 11.3, data=0.01, waiting=0.7, straggler=1, its_host="n2", cause="cpu"
)


def run(training: float, wall: float = 0.0) -> Measurement:
    wall = wall or training + 2
    return Measurement(wall, wall - training, training, 0.0)


def test_ladder_layouts() -> None:
    assert [layout.label for layout in ladder(2, 4)] == ["1×1", "1×4", "2×1", "2×4"]
    assert [layout.label for layout in ladder(1, 2)] == ["1×1", "1×2"]
    assert ladder(1, 1) == [Layout(1, 1)]


def test_startup_training_and_shutdown_add_up() -> None:
    events = [
        Event("world joined", time=102.0),
        Event("world joined", time=102.5),
        Event("rank ended", time=109.0),
        Event("rank ended", time=109.5),
        TRAINED_EVENT,
    ]
    measured = measure(10.0, 100.0, events)
    assert (measured.startup, measured.training, measured.shutdown) == (2.5, 7.0, 0.5)
    assert measured.startup + measured.training + measured.shutdown == measured.wall
    assert measured.samples == 76_800
    assert measured.speed == pytest.approx(76_800 / 4.5)
    assert measured.shares is not None
    assert measured.shares["data"] == 0.3


def test_measures_script_without_training_events() -> None:
    measured = measure(3.0, 50.0, [Event("joined")])
    assert (measured.samples, measured.loop, measured.shares) == (None, None, None)
    assert measured.startup + measured.training + measured.shutdown == 3.0


def test_speed_up_and_efficiency() -> None:
    layouts = ladder(2, 2)
    rows = make_rows(
        list(zip(layouts, [[run(8), run(8)], [run(5)], [run(4)], [run(2.5)]], strict=True))
    )
    assert [round(row.speedup, 2) for row in rows] == [1.0, 1.6, 2.0, 3.2]
    assert [round(row.efficiency, 2) for row in rows] == [1.0, 0.8, 1.0, 0.8]
    assert rows[0].spread == 0.0


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ((8, 7, 4, 3.9), "computing: one node alone is slow already"),
        ((8, 4, 7, 3.9), "communication: one process a node is slow already"),
        ((8, 4, 4, 3.9), "unknown"),
        ((8, 4, 4, 2), ""),
    ],
)
def test_limit_is_inferred_from_layouts(times: tuple[float, ...], reason: str) -> None:
    rows = make_rows(list(zip(ladder(2, 2), [[run(t)] for t in times], strict=True)))
    assert limit(rows[-1], rows).startswith(reason)
    assert bool(limit(rows[-1], rows)) == bool(reason)


def test_limit_prefers_reported_shares() -> None:
    slow = measure(10.0, 0.0, [TRAINED_EVENT])
    rows = make_rows([(Layout(1, 1), [run(0.00001)]), (Layout(2, 2), [slow])])
    assert limit(rows[1], rows) == "data: 30% of the time was spent waiting for it"


def test_straggler_wait_is_not_communication() -> None:
    slow = measure(20.0, 0.0, [STRAGGLER_EVENT])
    fast = measure(20.0, 0.0, [TRAINED_EVENT])
    rows = make_rows([(Layout(1, 1), [fast]), (Layout(2, 1), [slow])])
    assert limit(rows[1], rows) == "waiting for rank 1 on n2: 70% of the time"


def test_weak_scaling_with_fixed_batch_per_process() -> None:
    """Twice the work in nearly the same time is good efficiency."""
    measured = [(Layout(1, 1), [run(8)]), (Layout(2, 1), [run(8.4)])]
    strong, weak = make_rows(measured), make_rows(measured, weak=True)
    assert round(strong[1].efficiency, 2) == 0.48
    assert "use --weak" in advice(strong)
    assert round(weak[1].efficiency, 2) == 0.95
    assert limit(weak[1], weak) == advice(weak, weak=True) == ""
    measured = measure(10.0, 0.0, [TRAINED_EVENT])
    with_samples = [(Layout(1, 1), [measured]), (Layout(2, 1), [measured])]
    assert make_rows(with_samples, weak=True)[1].speedup == 1.0  # the number of samples is known
    assert advice(make_rows(with_samples)) == ""


def test_renders_table_svg_and_json() -> None:
    rows = make_rows(
        list(zip(ladder(2, 2), [[run(8)], [run(5)], [run(4)], [run(3.9)]], strict=True))
    )
    lines = format_table(rows).splitlines()
    assert len([line for line in lines if not line.startswith("  ")]) == 5
    assert "one process: limited by computing alone" in format_table(rows)
    assert "2 processes on one node: 80% of the ideal, nothing limits it much" in format_table(rows)
    assert "1 process on each of 2 nodes: 100% of the ideal" in format_table(rows)
    assert max(map(len, lines)) <= 80
    assert "limited by" in lines[-2] + lines[-1]
    assert lines[0].split()[:2] == ["layout", "wall"]
    assert ElementTree.fromstring(draw(rows)).tag.endswith("svg")
    assert to_json(rows)[3]["runs"][0]["wall"] == pytest.approx(5.9)
