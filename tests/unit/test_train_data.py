"""Batches come in order, with the same randomness wherever they are made."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, dataloader

from paceline.launch.elastic.rank_events import WORKER_KILLED
from paceline.spec.errors import SettingError
from paceline.train.data import fetch
from paceline.train.data.fetch import (
    BatchRequest,
    Draws,
    Fetch,
    _to_device,
    loader_workers,
    prefetch,
    usable_cpus,
)
from paceline.train.data.loader import Batch

CPU = torch.device("cpu")


class Noisy(Dataset[Any]):
    """Samples that draw from every generator, and that know which process made them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index, *noise], dtype=torch.float64), os.getpid()


def wanted(start: int, stop: int, train: bool = True) -> BatchRequest[int]:
    positions = np.arange(start, stop)
    return BatchRequest(positions[::-1].copy(), Draws(3, 1, positions) if train else None, start)


def test_randomness_belongs_to_the_sample() -> None:
    fetch = Fetch(Noisy(), CPU)
    whole = next(fetch([wanted(0, 8)]))[1][0]
    halves = [data[0] for _, data in fetch([wanted(0, 4), wanted(4, 8)])]
    assert torch.equal(whole[:, 1:], torch.cat(halves)[:, 1:])
    assert len(whole[:, 1:].unique()) == 24


def test_the_process_draws_on_as_before() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    next(Fetch(Noisy(), CPU)([wanted(0, 4)]))
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_workers_make_the_same_samples() -> None:
    orders = [wanted(start, start + 4) for start in range(0, 20, 4)]
    here = list(Fetch(Noisy(), CPU)(orders))
    fetch = Fetch(Noisy(), CPU, workers=1)
    for _ in range(2):  # the worker stays for the next epoch
        there = list(fetch(orders))
        assert [tag for tag, _ in there] == [0, 4, 8, 12, 16]
        for (_, mine), (_, theirs) in zip(here, there, strict=True):
            assert torch.equal(mine[0], theirs[0])
            assert os.getpid() not in theirs[1]
    del fetch


def test_tensor_data_sets_are_indexed_at_once() -> None:
    data = TensorDataset(torch.arange(20), torch.arange(20) * 2)
    ((_, (inputs, targets)),) = Fetch(data, CPU)([wanted(4, 7)])
    assert (inputs.tolist(), targets.tolist()) == ([6, 5, 4], [12, 10, 8])


class Slow:
    """A data set whose batches are made ahead."""

    slow = True

    def __init__(self) -> None:
        self.made: list[int] = []

    def __len__(self) -> int:
        return 20

    def batch(self, ids: Any, draws: Any) -> tuple[torch.Tensor, ...]:
        self.made.append(int(ids[0]))
        if ids[0] == 13:
            raise OSError("torn")
        return (torch.from_numpy(ids),)


def test_slow_batches_are_made_ahead_and_errors_come_through() -> None:
    data = Slow()
    batches = Fetch(data, CPU)(wanted(start, start + 2) for start in range(0, 20, 2))
    assert next(batches)[0] == 0
    with pytest.raises(OSError, match="torn"):
        list(batches)
    assert data.made == [1, 3, 5, 7, 9, 11, 13]


def test_leaving_early_ends_the_thread() -> None:
    items = prefetch(iter(range(1000)))
    assert next(items) == 0
    items.close()


def test_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(fetch, "_QUOTA", quota)
    quota.write_text("100000 100000\n")
    assert usable_cpus() == 1
    quota.write_text("max 100000\n")
    assert usable_cpus() == len(os.sched_getaffinity(0))
    assert [loader_workers(cpus, ranks) for cpus, ranks in ((1, 1), (2, 2), (16, 4), (64, 1))] == [
        0, 0, 3, 8,
    ]  # fmt: skip


class Rows:
    """Samples of different lengths, as dictionaries."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.arange(index + 1)}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"ids": pad_sequence([row["ids"] for row in rows], batch_first=True)}


class Killed(Noisy):
    """Whose worker process somebody kills."""

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_was_killed_is_told_from_one_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where torch finds it gone before SIGCHLD has told it so: the job goes on after one."""
    monkeypatch.setattr(dataloader._utils.signal_handling, "_set_SIGCHLD_handler", lambda: None)
    iterator = dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(iterator._try_get_data, "__defaults__", (0.1,))
    former = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        next(Fetch(Killed(), CPU, workers=1)([wanted(0, 4)]))
    except RuntimeError as error:
        said, before = str(error), str(error.__cause__)
    finally:
        signal.signal(signal.SIGCHLD, former)
    gc.collect()  # the worker's pipes
    assert WORKER_KILLED.search(said)
    assert "exited unexpectedly" in before


@pytest.mark.parametrize("how", [ConnectionResetError, EOFError, FileNotFoundError])
def test_a_worker_that_was_killed_while_it_handed_a_batch_over(
    how: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends before the process has, and torch says no more than that."""
    fork = multiprocessing.get_context("fork")
    worker = fork.Process(target=time.sleep, args=(60,), daemon=True)

    class Given:
        _workers = (worker,)

        def __iter__(self) -> Given:
            return self

        def __next__(self) -> object:
            threading.Timer(0.2, worker.kill).start()
            raise how

    fetcher = Fetch(Noisy(), CPU, workers=1)
    monkeypatch.setattr(fetch, "DataLoader", lambda *_, **__: Given())
    worker.start()
    with pytest.raises(RuntimeError) as caught:
        next(fetcher([wanted(0, 4)]))
    assert WORKER_KILLED.search(str(caught.value))
    worker.join()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_as_the_script_makes_it(workers: int) -> None:
    fetch = Fetch(Rows(), CPU, workers, padded)
    ((_, (made,)),) = fetch([wanted(2, 4)])
    assert made["ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    batch = Batch((made,), 2, 2, np.array([3, 2]), 4)
    assert dict(**batch)["ids"] is batch["ids"] is made["ids"]


def test_collate_also_for_tensors() -> None:
    data = TensorDataset(torch.arange(4))
    ((_, made),) = Fetch(data, CPU, collate=lambda rows: torch.stack([r[0] * 2 for r in rows]))(
        [wanted(1, 3)]
    )
    assert made[0].tolist() == [4, 2]


@pytest.mark.parametrize("data", [DataLoader(TensorDataset(torch.zeros(3))), iter([1, 2])])
def test_no_data_set(data: Any) -> None:
    with pytest.raises(SettingError, match="data set with a length"):
        Fetch(data, CPU)


def test_copies_to_an_accelerator_go_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from other memory would not be asynchronous, and must not be called so."""
    pinned: list[torch.Tensor] = []
    copies: list[bool] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        copies.append(non_blocking)
        return tensor

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    value = {"a": torch.ones(2), "b": [torch.zeros(1), "text"]}
    for pins in (True, False):
        pinned.clear(), copies.clear()
        _to_device(value, torch.device("meta"), pins)
        assert (len(pinned), copies) == (2 * pins, [pins, pins])


def test_copies_run_ahead_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is waited for by the stream that computes, which then holds its memory."""
    said: list[Any] = []

    class Stream:
        def __init__(self, device: Any) -> None:
            self.inside = False

        def __enter__(self) -> None:
            self.inside = True

        def __exit__(self, *_: object) -> None:
            self.inside = False

        def record_event(self) -> int:
            assert self.inside
            said.append("copied")
            return said.count("copied")

        def wait_event(self, event: int) -> None:
            said.append(("wait", event))

    now = Stream(None)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: said.append("held"))
    monkeypatch.setattr("paceline.train.data.fetch._to_device", lambda value, device, pins: value)
    fetch = Fetch(Slow(), torch.device("cuda"))
    got = [(tag, data[0].tolist()) for tag, data in fetch([wanted(0, 2), wanted(2, 4)])]
    assert got == [(0, [1, 0]), (2, [3, 2])]
    waits = [("wait", 1), "held", ("wait", 2), "held"]
    assert [one for one in said if one != "copied"] == waits
    assert all(said.index("copied") < said.index(one) for one in waits)


def test_the_scripts_generators_do_not_hang_on_the_loader() -> None:
    """A resumed epoch begins a new iteration; nothing may be drawn for that."""
    fetch = Fetch(Noisy(), CPU, workers=1)
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    list(fetch([wanted(0, 4)]))
    list(fetch([wanted(4, 8)]))
    assert torch.rand(()) == expected
    fetch._loader = None
