"""Tests that messages of the ranks at the start are replayed to a process that joins later."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch.distributed import HashStore

from paceline.spec.errors import JobError
from paceline.train.comms import Comms
from paceline.train.elastic import newcomer
from paceline.train.elastic.newcomer import Recording, Replay, wait_for_start
from paceline.train.elastic.stop import Poll
from paceline.train.metrics import Meter
from paceline.train.world import World

T = TypeVar("T")
TIMEOUT = timedelta(seconds=0.2)


class DirectOperations:
    """Executes operations directly."""

    stale = False

    def event(self, act: Callable[[], T]) -> T:
        return act()

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()


def make_recording() -> tuple[Recording, HashStore]:
    return Recording(DirectOperations(), {"ranks": 3}), HashStore()


def fail_if_called() -> None:
    raise AssertionError("a newcomer has nobody to ask")


def make_replay(recording: Recording, store: HashStore) -> Replay:
    recording.publish(store)
    return wait_for_start(store, TIMEOUT)


def test_replay_returns_recorded_answers() -> None:
    recording, store = make_recording()
    answers = [
        torch.tensor([[1.5, float("nan")], [2.0, -0.0]], dtype=torch.float64),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor(7, dtype=torch.bfloat16),
        ["n1\0a", "n2\0ü"],
        [0.1, float("inf")],
        None,
    ]
    for answer in answers:
        recording.event(lambda answer=answer: answer)
    replay = make_replay(recording, store)
    assert replay.info == {"ranks": 3}
    for answer in answers:
        found = replay.event(fail_if_called)
        if isinstance(answer, torch.Tensor):
            assert found.dtype == answer.dtype
            assert torch.equal(found, answer) or bool(answer.isnan().any())
            assert found.shape == answer.shape
        else:
            assert found == answer


def test_mark_skips_unneeded_answers() -> None:
    recording, store = make_recording()
    for name in ("prepare", "checkpoints"):
        recording.event(lambda name=name: [name, "more than a newcomer asks"])
        recording.event(lambda: None)
        recording.mark(name)
    recording.event(lambda: ["epochs"])
    with recording.paused():
        recording.event(lambda: ["only for those who have somebody to compare with"])
    replay = make_replay(recording, store)
    replay.mark("checkpoints")
    assert replay.event(fail_if_called) == ["epochs"]
    with pytest.raises(JobError, match=r"(?s)started differently.*after checkpoints"):
        replay.event(fail_if_called)


def test_replay_rejects_extra_operations() -> None:
    recording, store = make_recording()
    recording.event(lambda: None)
    recording.mark("prepare")
    recording.event(lambda: None)
    replay = make_replay(recording, store)
    replay.event(fail_if_called)
    with pytest.raises(JobError, match="started differently"):
        replay.event(fail_if_called)


def test_recording_is_published_in_parts_to_each_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomer, "_PART_BYTES", 100)
    recording, store = make_recording()
    recording.event(lambda: "x" * 1000)
    assert make_replay(recording, store).event(fail_if_called) == "x" * 1000
    second_store = HashStore()
    recording.publish(second_store)
    recording.publish(second_store)
    assert wait_for_start(second_store, TIMEOUT).event(fail_if_called) == "x" * 1000


def test_recording_beyond_limit_prevents_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomer, "MAX_BYTES", 1 << 20)
    recording, store = make_recording()
    for _ in range(12):
        assert recording.event(lambda: "x" * 100_000)
    assert "more than 1 MiB" in recording.obstacle
    recording.publish(store)
    with pytest.raises(JobError, match="have not left"):
        wait_for_start(store, TIMEOUT)


def test_unserializable_answer_is_obstacle() -> None:
    recording, _ = make_recording()
    recording.event(lambda: {1, 2})
    assert "set" in recording.obstacle


class FakeJoinGate:
    """A join gate through which a rank may know of a newcomer."""

    def __init__(self, number: int) -> None:
        self.number, self.heard = number, (-1, -1)

    def pending_generation(self) -> int:
        return self.number

    def agree_to_join(self, lowest: int, highest: int) -> None:
        self.heard = lowest, highest


def test_poll_exchanges_pending_generation() -> None:
    gate = FakeJoinGate(3)
    poll = Poll(Comms(World(), torch.device("cpu")), gate)
    assert poll.exchange(save=True).save
    assert gate.heard == (3, 3)


def test_meter_rolls_back_to_mark() -> None:
    meter = Meter(lambda vector: vector, torch.device("cpu"))
    meter.add(2, loss=torch.tensor([1.0, 2.0]))
    meter.mark()
    meter.add(2, loss=torch.tensor([5.0, 5.0]), other=torch.tensor([5.0, 5.0]))
    meter.roll_back()
    means = meter.result()
    assert (means.count, means.sums) == (2, {"loss": 3.0})
    meter.add(1, loss=torch.tensor([1.0]))
    meter.roll_back()  # nothing was marked since
    assert meter.empty


def test_source_of_unimported_module_reads_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_later.py").write_text("1 / 0\n")
    found = newcomer.source_of("imported_later")
    assert found is not None
    assert "imported_later" not in sys.modules
    (tmp_path / "imported_later.py").write_text("1 / 1\n")
    importlib.import_module("imported_later")
    assert newcomer.sources()["imported_later"] not in (None, found)
    assert newcomer.source_of("imported_later") == newcomer.sources()["imported_later"]
    assert newcomer.source_of("no_such_module") is None
    assert newcomer.source_of("no_such_package.module") is None
