"""Tests that trackers get every record once, and can neither stop nor delay a training."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.recipes.options import TRACKERS as OPTIONS
from paceline.train.trackers import MAX_FAILURES, TRACKERS, Record, TrackerThread, numbers


class MemoryTracker:
    """Keeps records in memory."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id or "new"
        self.got: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.got.append((step, values))

    def close(self) -> None:
        self.closed = True


class FailingTracker(MemoryTracker):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        raise ConnectionError("no network")


def record(step: int, split: str = "train") -> Record:
    return Record(split, step, {"loss": 1.0 / step})


def send_records(
    tracker: MemoryTracker, notes: Path, steps: range, *, resumed: bool = False
) -> list[str]:
    reported: list[str] = []
    tracker_thread = TrackerThread(
        "it", lambda run_id: tracker, notes, reported.append, resumed=resumed
    )
    for step in steps:
        tracker_thread.submit(record(step))
    tracker_thread.close()
    return reported


def test_sends_each_record_once_across_resume(tmp_path: Path) -> None:
    first, second = MemoryTracker(""), MemoryTracker("")
    assert send_records(first, tmp_path / "n", range(1, 6)) == []
    send_records(second, tmp_path / "n", range(3, 8), resumed=True)
    assert [step for step, _ in first.got + second.got] == [1, 2, 3, 4, 5, 6, 7]
    assert first.got[0][1] == {"train/loss": 1.0}
    assert first.closed
    assert json.loads((tmp_path / "n").read_text()) == {"run_id": "new", "sent": {"train": 7}}


def test_run_without_resume_sends_all_records(tmp_path: Path) -> None:
    tracker = MemoryTracker("")
    send_records(MemoryTracker(""), tmp_path / "n", range(1, 6))
    send_records(tracker, tmp_path / "n", range(1, 4))
    assert len(tracker.got) == 3


def test_resume_reuses_run_id(tmp_path: Path) -> None:
    requested_ids: list[str] = []

    def open_tracker(run_id: str) -> MemoryTracker:
        requested_ids.append(run_id)
        return MemoryTracker(run_id or "abc")

    for resumed in (False, True):
        tracker_thread = TrackerThread("it", open_tracker, tmp_path / "n", print, resumed=resumed)
        tracker_thread.submit(record(1 + resumed))
        tracker_thread.close()
    assert requested_ids == ["", "abc"]


def test_stops_after_repeated_failures(tmp_path: Path) -> None:
    tracker = FailingTracker("")
    reported = send_records(tracker, tmp_path / "n", range(1, 20))
    assert len(tracker.got) == MAX_FAILURES
    assert len(reported) == 2
    assert "ConnectionError: no network" in reported[0]
    assert "no more records" in reported[1]


def test_reports_tracker_that_cannot_open(tmp_path: Path) -> None:
    def open_tracker(run_id: str) -> MemoryTracker:
        raise ImportError("No module named 'wandb'")

    reported: list[str] = []
    tracker_thread = TrackerThread(
        "wandb", open_tracker, tmp_path / "n", reported.append, resumed=False
    )
    tracker_thread.submit(record(1))
    tracker_thread.close()
    assert reported == ["wandb: ImportError: No module named 'wandb'"]


def test_hanging_tracker_does_not_block_training(tmp_path: Path) -> None:
    release = threading.Event()

    class HangingTracker(MemoryTracker):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            release.wait(30)

    reported: list[str] = []
    tracker_thread = TrackerThread(
        "it", lambda run_id: HangingTracker(""), tmp_path / "n", reported.append, resumed=False
    )
    started = time.monotonic()
    for step in range(1, 3000):
        tracker_thread.submit(record(step))
    tracker_thread.close(seconds=0.1)
    assert time.monotonic() - started < 20  # one wait alone would take 30 s
    assert reported == [
        "it is too slow: some records are lost",
        "it did not finish within 0.1 s: left behind",
    ]
    release.set()
    tracker_thread.close()


def test_only_numbers_are_sent() -> None:
    record_values = {"loss": 0.5, "step": 3, "name": "x", "nan": float("nan"), "hit": True}
    assert numbers(record_values) == {"loss": 0.5, "step": 3.0, "hit": 1.0}


def test_tracker_names_match_options() -> None:
    assert tuple(TRACKERS) == OPTIONS
