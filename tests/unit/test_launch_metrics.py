"""Tests that metrics.jsonl contains every step once, after restarts and later runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from paceline.launch import recorder
from paceline.launch.recorder import MAX_SHORT_REPORT_BYTES, Recorder
from paceline.launch.terminal.screen import Screen
from paceline.rundir.directory import CHECKED_BYTES, RunDirectory
from paceline.spec.events import Event
from paceline.spec.rundir import EVENTS
from paceline.spec.training.metrics import recorded_steps


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory(tmp_path / "run")
    yield directory
    directory.close()


class MetricsLog(Recorder):
    """A recorder with methods that send it events of a training."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory, Screen())

    def begin(self, resumed: bool) -> None:
        self.record(Event("begin", "n1", 0, fields={"resumed": resumed}))

    def append(self, record: dict[str, Any]) -> None:
        self.record(Event("metrics", "n1", 0, fields=record))


def test_events_in_memory_are_bounded(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last events are kept, as for readers of a long file."""
    monkeypatch.setattr(recorder, "MAX_HISTORY_BYTES", 2000)
    log = MetricsLog(directory)
    for number in range(100):
        log.event("note", "n1", 0, number=number, text="x" * 100)
    numbers = [event["number"] for event in log.events]
    assert 16 < len(numbers) < 30
    first = [number for number in numbers if number < 50]
    assert numbers == [*range(len(first)), *range(100 - len(numbers) + len(first), 100)]
    log.event("note", text="x" * 3000)
    assert [event["number"] for event in log.events] == first


def test_metrics_in_memory_are_bounded(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_METRICS", 3)
    log = MetricsLog(directory)
    per_class = [0.5] * 500
    log.append({"loss": 1.0, "a": per_class, "long": "x" * 100_000, "nested": [[]] * 2000})
    log.append({"loss": 0.5, "b": 3, "c": 4})
    assert log.metrics == {"loss": 0.5, "a": per_class, "b": 3}
    log.append({"a": "x" * 100_000})
    assert log.metrics == {"loss": 0.5, "b": 3}  # an outdated value must not be kept


def log_steps(log: MetricsLog, *steps: int) -> None:
    for step in steps:
        log.append({"split": "train", "step": step, "loss": 1 / step})


def read_steps(directory: RunDirectory, name: str = "metrics.jsonl") -> list[Any]:
    lines = (directory.path / name).read_text().splitlines()
    return [json.loads(line).get("step") for line in lines]


def test_restart_does_not_repeat_steps(directory: RunDirectory) -> None:
    log = MetricsLog(directory)
    log.next_attempt()
    log.begin(resumed=False)
    log_steps(log, 1, 2, 3, 4)
    log.append({"split": "test", "step": 2, "accuracy": 0.5})
    log.next_attempt()
    log.begin(resumed=True)
    log_steps(log, 3, 4, 5)
    log.append({"split": "test", "step": 4, "accuracy": 0.6})
    assert read_steps(directory) == [1, 2, 3, 4, 2, 5, 4]
    assert log.metrics["accuracy"] == 0.6


def test_restart_without_checkpoint_does_not_repeat_steps(directory: RunDirectory) -> None:
    log = MetricsLog(directory)
    for steps in ((1, 2), (1, 2, 3)):
        log.next_attempt()
        log.begin(resumed=False)
        log_steps(log, *steps)
    assert read_steps(directory) == [1, 2, 3]


def test_restart_without_begin_event_does_not_repeat_steps(directory: RunDirectory) -> None:
    log = MetricsLog(directory)
    for steps in ((1, 2), (1, 2, 3)):
        log.next_attempt()
        log_steps(log, *steps)
    assert read_steps(directory) == [1, 2, 3]


def test_attempt_may_record_step_twice(directory: RunDirectory) -> None:
    log = MetricsLog(directory)
    log.append({"split": "train", "step": 2, "loss": 1.0})
    log.append({"split": "train", "step": 2, "norm": 3.0})
    log.append({"anything": 1})
    assert read_steps(directory) == [2, 2, None]


def test_later_run_appends_or_archives_metrics(directory: RunDirectory) -> None:
    log_steps(MetricsLog(directory), 1, 2, 3)
    resumed_log = MetricsLog(directory)
    resumed_log.begin(resumed=True)
    log_steps(resumed_log, 2, 3, 4)
    assert read_steps(directory) == [1, 2, 3, 4]
    restarted_log = MetricsLog(directory)
    restarted_log.begin(resumed=False)
    log_steps(restarted_log, 1)
    assert read_steps(directory) == [1]
    (before,) = directory.path.glob("metrics-before-*.jsonl")
    assert read_steps(directory, before.name) == [1, 2, 3, 4]


def test_skips_truncated_records(tmp_path: Path) -> None:
    lines = ['{"split": "train", "step": 3}', '{"split": "tr', "7", '{"step": null}', '{"a": 1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert recorded_steps(tmp_path / "metrics.jsonl") == {"train": 3}


def test_late_metrics_of_previous_writer_fill_gaps(
    directory: RunDirectory,
) -> None:
    """The former writer's host was unreachable for a while; steps that only it knew are kept."""
    log = MetricsLog(directory)
    log.begin(resumed=False)
    log_steps(log, 1, 2, 3)
    log.record(Event("begin", "n2", 1, fields={"resumed": True}))
    for step in (2, 3, 5, 6, 6, 7):  # a step may have several records
        log.record(Event("metrics", "n2", 1, fields={"split": "train", "step": step}))
    log_steps(log, 4, 5, 6)
    assert read_steps(directory) == [1, 2, 3, 5, 6, 6, 7, 4]


def test_names_rank_with_most_output_when_disk_is_nearly_full(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Mock()
    log = Recorder(directory, screen)
    disk = SimpleNamespace(total=1 << 40, free=4 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    for rank, size in ((0, 10), (1, CHECKED_BYTES), (2, 10)):
        log.record(Event("output", f"n{rank}", rank, fields={"stream": "out"}, blob=b"x" * size))
        disk.free = 1 << 30
    assert "The most output is that of rank 1 on n1: 1 MiB." in screen.note.call_args[0][0]


def event_kinds(directory: RunDirectory) -> list[str]:
    return [json.loads(line)["event"] for line in (directory.path / EVENTS).open()]


def test_reports_of_ranks_leave_disk_space_free(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events of launcher and agents, and few of a rank, are written; others stay in memory."""
    disk = SimpleNamespace(total=1 << 40, free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    log = Recorder(directory, Mock())
    log.event("started", attempt=0, world_size=2)
    log.record(Event("flood", "n2", 1, fields={"text": "x" * MAX_SHORT_REPORT_BYTES}))
    log.record(Event("own", "n2", 1))
    log.record(Event("metrics", "n2", 1, fields={"step": 1, "split": "train"}))
    log.record(Event("trained", "n1", 0))
    log.record(Event("rank thawed", "n2", 1))
    assert event_kinds(directory) == ["started", "flood", "trained", "rank thawed"]
    assert not (directory.path / "metrics.jsonl").exists()
    assert [event.kind for event in log.events][2:] == ["own", "trained", "rank thawed"]


def test_reports_of_each_rank_have_quota(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_RANK_BYTES", 1000)
    screen = Mock()
    log = Recorder(directory, screen)
    for _ in range(50):
        log.record(Event("flood", "n2", 1, fields={"text": "x" * 100}))
        log.record(Event("metrics", "n2", 1, fields={"text": "x" * 100}))
    log.record(Event("own", "n1", 0))
    assert 0 < event_kinds(directory).count("flood") < 5
    assert event_kinds(directory)[-1] == "own"
    assert screen.note.call_count == 1
    assert "rank 1 on n2" in screen.note.call_args[0][0]


def test_flood_of_one_rank_keeps_events_of_others_in_memory(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_HISTORY_BYTES", 2000)
    log = Recorder(directory, Mock())
    for number in range(100):
        log.record(Event("flood", "n2", 1, fields={"text": "x" * 100}))
        if number == 50:
            log.record(Event("trained", "n1", 0, fields={"steps": 5}))
            log.event("lost", "n3", why="x")
    kinds = [event.kind for event in log.events]
    assert {"trained", "lost"} < {*kinds}
    assert kinds[0] == kinds[-1] == "flood"
