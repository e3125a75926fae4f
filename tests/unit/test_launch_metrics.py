"""metrics.jsonl has every step once, over restarts and later runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import recorder
from paceline.launch.recorder import Recorder
from paceline.launch.terminal.screen import Screen
from paceline.rundir.directory import RunDirectory
from paceline.spec.events import Event
from paceline.spec.training.metrics import recorded_steps


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory(tmp_path / "run")
    yield directory
    directory.close()


class MetricsLog(Recorder):
    """The recorder, told of a training."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory, Screen())

    def begin(self, resumed: bool) -> None:
        self.record(Event("begin", "n1", 0, fields={"resumed": resumed}))

    def append(self, record: dict[str, Any]) -> None:
        self.record(Event("metrics", "n1", 0, fields=record))


def test_events_kept_in_memory_are_bounded(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the beginning and of the end are kept, as readers of the file see them."""
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


def test_metrics_kept_in_memory_are_bounded(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_METRICS", 3)
    log = MetricsLog(directory)
    per_class = [0.5] * 500
    log.append({"loss": 1.0, "a": per_class, "long": "x" * 100_000, "nested": [[]] * 2000})
    log.append({"loss": 0.5, "b": 3, "c": 4})
    assert log.metrics == {"loss": 0.5, "a": per_class, "b": 3}
    log.append({"a": "x" * 100_000})
    assert log.metrics == {"loss": 0.5, "b": 3}  # rather none than one that is not the last


def trained(log: MetricsLog, *steps: int) -> None:
    for step in steps:
        log.append({"split": "train", "step": step, "loss": 1 / step})


def kept(directory: RunDirectory, name: str = "metrics.jsonl") -> list[Any]:
    lines = (directory.path / name).read_text().splitlines()
    return [json.loads(line).get("step") for line in lines]


def test_a_restart_repeats_nothing(directory: RunDirectory) -> None:
    log = MetricsLog(directory)
    log.next_attempt()
    log.begin(resumed=False)
    trained(log, 1, 2, 3, 4)
    log.append({"split": "test", "step": 2, "accuracy": 0.5})
    log.next_attempt()
    log.begin(resumed=True)
    trained(log, 3, 4, 5)
    log.append({"split": "test", "step": 4, "accuracy": 0.6})
    assert kept(directory) == [1, 2, 3, 4, 2, 5, 4]
    assert log.metrics["accuracy"] == 0.6


def test_nor_a_restart_before_the_first_checkpoint(directory: RunDirectory) -> None:
    log = MetricsLog(directory)
    for steps in ((1, 2), (1, 2, 3)):
        log.next_attempt()
        log.begin(resumed=False)
        trained(log, *steps)
    assert kept(directory) == [1, 2, 3]


def test_nor_a_script_that_never_says_what_it_does(directory: RunDirectory) -> None:
    log = MetricsLog(directory)
    for steps in ((1, 2), (1, 2, 3)):
        log.next_attempt()
        trained(log, *steps)
    assert kept(directory) == [1, 2, 3]


def test_one_attempt_may_say_several_things_of_a_step(directory: RunDirectory) -> None:
    log = MetricsLog(directory)
    log.append({"split": "train", "step": 2, "loss": 1.0})
    log.append({"split": "train", "step": 2, "norm": 3.0})
    log.append({"anything": 1})
    assert kept(directory) == [2, 2, None]


def test_a_later_run_goes_on_or_begins_anew(directory: RunDirectory) -> None:
    trained(MetricsLog(directory), 1, 2, 3)
    again = MetricsLog(directory)
    again.begin(resumed=True)
    trained(again, 2, 3, 4)
    assert kept(directory) == [1, 2, 3, 4]
    anew = MetricsLog(directory)
    anew.begin(resumed=False)
    trained(anew, 1)
    assert kept(directory) == [1]
    (before,) = directory.path.glob("metrics-before-*.jsonl")
    assert kept(directory, before.name) == [1, 2, 3, 4]


def test_torn_lines_are_no_records(tmp_path: Path) -> None:
    lines = ['{"split": "train", "step": 3}', '{"split": "tr', "7", '{"step": null}', '{"a": 1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert recorded_steps(tmp_path / "metrics.jsonl") == {"train": 3}


def test_what_a_former_first_rank_said_arrives_after_the_next_one_has_said_it(
    directory: RunDirectory,
) -> None:
    """Its host could not be heard, and was; what the next one did not know is kept all the same."""
    log = MetricsLog(directory)
    log.begin(resumed=False)
    trained(log, 1, 2, 3)
    log.record(Event("begin", "n2", 1, fields={"resumed": True}))
    for step in (2, 3, 5, 6, 6, 7):  # of one step there may be several
        log.record(Event("metrics", "n2", 1, fields={"split": "train", "step": step}))
    trained(log, 4, 5, 6)
    assert kept(directory) == [1, 2, 3, 5, 6, 6, 7, 4]
