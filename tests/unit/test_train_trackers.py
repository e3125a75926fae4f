"""Trackers get every record once, and can neither stop nor slow a training."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.recipes.options import TRACKERS as OPTIONS
from paceline.train.trackers import MAX_FAILURES, TRACKERS, Record, TrackerThread, numbers


class Remembering:
    """A tracker in memory."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id or "new"
        self.got: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.got.append((step, values))

    def close(self) -> None:
        self.closed = True


class Failing(Remembering):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        raise ConnectionError("no network")


def record(step: int, split: str = "train") -> Record:
    return Record(split, step, {"loss": 1.0 / step})


def fed(tracker: Remembering, notes: Path, steps: range, *, resumed: bool = False) -> list[str]:
    warned: list[str] = []
    guard = TrackerThread("it", lambda run_id: tracker, notes, warned.append, resumed=resumed)
    for step in steps:
        guard.submit(record(step))
    guard.close()
    return warned


def test_every_record_once_also_after_a_resume(tmp_path: Path) -> None:
    first, second = Remembering(""), Remembering("")
    assert fed(first, tmp_path / "n", range(1, 6)) == []
    fed(second, tmp_path / "n", range(3, 8), resumed=True)
    assert [step for step, _ in first.got + second.got] == [1, 2, 3, 4, 5, 6, 7]
    assert first.got[0][1] == {"train/loss": 1.0}
    assert first.closed
    assert json.loads((tmp_path / "n").read_text()) == {"run_id": "new", "sent": {"train": 7}}


def test_a_new_beginning_sends_everything(tmp_path: Path) -> None:
    tracker = Remembering("")
    fed(Remembering(""), tmp_path / "n", range(1, 6))
    fed(tracker, tmp_path / "n", range(1, 4))
    assert len(tracker.got) == 3


def test_the_run_goes_on_under_its_id(tmp_path: Path) -> None:
    asked: list[str] = []

    def opened(run_id: str) -> Remembering:
        asked.append(run_id)
        return Remembering(run_id or "abc")

    for resumed in (False, True):
        guard = TrackerThread("it", opened, tmp_path / "n", print, resumed=resumed)
        guard.submit(record(1 + resumed))
        guard.close()
    assert asked == ["", "abc"]


def test_failures_are_told_once_and_then_left_alone(tmp_path: Path) -> None:
    tracker = Failing("")
    warned = fed(tracker, tmp_path / "n", range(1, 20))
    assert len(tracker.got) == MAX_FAILURES
    assert len(warned) == 2
    assert "ConnectionError: no network" in warned[0]
    assert "no more records" in warned[1]


def test_what_cannot_be_opened_is_told(tmp_path: Path) -> None:
    def opened(run_id: str) -> Remembering:
        raise ImportError("No module named 'wandb'")

    warned: list[str] = []
    guard = TrackerThread("wandb", opened, tmp_path / "n", warned.append, resumed=False)
    guard.submit(record(1))
    guard.close()
    assert warned == ["wandb: ImportError: No module named 'wandb'"]


def test_a_hanging_tracker_costs_no_time(tmp_path: Path) -> None:
    release = threading.Event()

    class Hanging(Remembering):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            release.wait(30)

    warned: list[str] = []
    guard = TrackerThread(
        "it", lambda run_id: Hanging(""), tmp_path / "n", warned.append, resumed=False
    )
    started = time.monotonic()
    for step in range(1, 3000):
        guard.submit(record(step))
    guard.close(seconds=0.1)
    assert time.monotonic() - started < 20  # a single wait takes 30 s
    assert warned == [
        "it is too slow: some records are lost",
        "it did not finish within 0.1 s: left behind",
    ]
    release.set()
    guard.close()


def test_only_numbers_go_to_trackers() -> None:
    given = {"loss": 0.5, "step": 3, "name": "x", "nan": float("nan"), "hit": True}
    assert numbers(given) == {"loss": 0.5, "step": 3.0, "hit": 1.0}


def test_names_are_the_same_without_torch() -> None:
    assert tuple(TRACKERS) == OPTIONS
