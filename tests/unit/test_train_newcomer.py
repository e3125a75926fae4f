"""What ranks told each other at the start, given again to a process that comes later."""

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
SOON = timedelta(seconds=0.2)


class Direct:
    """Carries operations out."""

    stale = False

    def event(self, act: Callable[[], T]) -> T:
        return act()

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()


def recorded() -> tuple[Recording, HashStore]:
    return Recording(Direct(), {"ranks": 3}), HashStore()


def never() -> None:
    raise AssertionError("a newcomer has nobody to ask")


def replayed(recording: Recording, store: HashStore) -> Replay:
    recording.publish(store)
    return wait_for_start(store, SOON)


def test_a_newcomer_gets_what_the_others_got() -> None:
    recording, store = recorded()
    given = [
        torch.tensor([[1.5, float("nan")], [2.0, -0.0]], dtype=torch.float64),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor(7, dtype=torch.bfloat16),
        ["n1\0a", "n2\0ü"],
        [0.1, float("inf")],
        None,
    ]
    for one in given:
        recording.event(lambda one=one: one)
    replay = replayed(recording, store)
    assert replay.info == {"ranks": 3}
    for one in given:
        found = replay.event(never)
        if isinstance(one, torch.Tensor):
            assert found.dtype == one.dtype
            assert torch.equal(found, one) or bool(one.isnan().any())
            assert found.shape == one.shape
        else:
            assert found == one


def test_marks_pass_over_what_a_newcomer_does_not_need() -> None:
    recording, store = recorded()
    for name in ("prepare", "checkpoints"):
        recording.event(lambda name=name: [name, "more than a newcomer asks"])
        recording.event(lambda: None)
        recording.mark(name)
    recording.event(lambda: ["epochs"])
    with recording.paused():
        recording.event(lambda: ["only for those who have somebody to compare with"])
    replay = replayed(recording, store)
    replay.mark("checkpoints")
    assert replay.event(never) == ["epochs"]
    with pytest.raises(JobError, match=r"(?s)started differently.*after checkpoints"):
        replay.event(never)


def test_a_newcomer_that_does_more_than_the_others_is_refused() -> None:
    recording, store = recorded()
    recording.event(lambda: None)
    recording.mark("prepare")
    recording.event(lambda: None)
    replay = replayed(recording, store)
    replay.event(never)
    with pytest.raises(JobError, match="started differently"):
        replay.event(never)


def test_answers_are_left_in_parts_and_in_each_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomer, "_PART_BYTES", 100)
    recording, store = recorded()
    recording.event(lambda: "x" * 1000)
    assert replayed(recording, store).event(never) == "x" * 1000
    other = HashStore()
    recording.publish(other)
    recording.publish(other)
    assert wait_for_start(other, SOON).event(never) == "x" * 1000


def test_too_much_to_keep_means_that_nobody_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newcomer, "MAX_BYTES", 1 << 20)
    recording, store = recorded()
    for _ in range(12):
        assert recording.event(lambda: "x" * 100_000)
    assert "more than 1 MiB" in recording.obstacle
    recording.publish(store)
    with pytest.raises(JobError, match="have not left"):
        wait_for_start(store, SOON)


def test_something_that_cannot_be_told_is_said() -> None:
    recording, _ = recorded()
    recording.event(lambda: {1, 2})
    assert "set" in recording.obstacle


class Known:
    """A join gate at which a rank may know of a newcomer."""

    def __init__(self, number: int) -> None:
        self.number, self.heard = number, (-1, -1)

    def pending_generation(self) -> int:
        return self.number

    def agree_to_join(self, lowest: int, highest: int) -> None:
        self.heard = lowest, highest


def test_a_poll_tells_which_groups_ranks_know_of() -> None:
    door = Known(3)
    poll = Poll(Comms(World(), torch.device("cpu")), door)
    assert poll.exchange(save=True).save
    assert door.heard == (3, 3)


def test_what_was_measured_since_a_mark_can_be_taken_back() -> None:
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


def test_a_module_that_is_imported_later_is_known_by_its_file(
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
