"""Tests that batches come in order, with the same random numbers in any process."""

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


class NoisyDataset(Dataset[Any]):
    """Samples that draw from every generator and contain the id of their process."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index, *noise], dtype=torch.float64), os.getpid()


def make_request(start: int, stop: int, train: bool = True) -> BatchRequest[int]:
    positions = np.arange(start, stop)
    return BatchRequest(positions[::-1].copy(), Draws(3, 1, positions) if train else None, start)


def test_randomness_depends_only_on_sample() -> None:
    fetch = Fetch(NoisyDataset(), CPU)
    full_batch = next(fetch([make_request(0, 8)]))[1][0]
    halves = [data[0] for _, data in fetch([make_request(0, 4), make_request(4, 8)])]
    assert torch.equal(full_batch[:, 1:], torch.cat(halves)[:, 1:])
    assert len(full_batch[:, 1:].unique()) == 24


def test_fetch_preserves_global_generators() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    next(Fetch(NoisyDataset(), CPU)([make_request(0, 4)]))
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_worker_samples_match_main_process() -> None:
    orders = [make_request(start, start + 4) for start in range(0, 20, 4)]
    local_batches = list(Fetch(NoisyDataset(), CPU)(orders))
    fetch = Fetch(NoisyDataset(), CPU, workers=1)
    for _ in range(2):  # the worker is kept for the next epoch
        worker_batches = list(fetch(orders))
        assert [tag for tag, _ in worker_batches] == [0, 4, 8, 12, 16]
        for (_, local_data), (_, worker_data) in zip(local_batches, worker_batches, strict=True):
            assert torch.equal(local_data[0], worker_data[0])
            assert os.getpid() not in worker_data[1]
    del fetch


def test_tensor_dataset_is_indexed_by_batch() -> None:
    data = TensorDataset(torch.arange(20), torch.arange(20) * 2)
    ((_, (inputs, targets)),) = Fetch(data, CPU)([make_request(4, 7)])
    assert (inputs.tolist(), targets.tolist()) == ([6, 5, 4], [12, 10, 8])


class SlowDataset:
    """A data set whose batches are prefetched."""

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


def test_prefetches_slow_batches_and_propagates_errors() -> None:
    data = SlowDataset()
    batches = Fetch(data, CPU)(make_request(start, start + 2) for start in range(0, 20, 2))
    assert next(batches)[0] == 0
    with pytest.raises(OSError, match="torn"):
        list(batches)
    assert data.made == [1, 3, 5, 7, 9, 11, 13]


def test_closing_prefetch_ends_thread() -> None:
    items = prefetch(iter(range(1000)))
    assert next(items) == 0
    items.close()


def test_usable_cpus_and_loader_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(fetch, "_QUOTA", quota)
    quota.write_text("100000 100000\n")
    assert usable_cpus() == 1
    quota.write_text("max 100000\n")
    assert usable_cpus() == len(os.sched_getaffinity(0))
    assert [loader_workers(cpus, ranks) for cpus, ranks in ((1, 1), (2, 2), (16, 4), (64, 1))] == [
        0, 0, 3, 8,
    ]  # fmt: skip


class DictDataset:
    """Samples of different lengths, as dictionaries."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.arange(index + 1)}


def pad_rows(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"ids": pad_sequence([row["ids"] for row in rows], batch_first=True)}


class KilledWorkerDataset(NoisyDataset):
    """A data set whose worker process is killed."""

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_reports_killed_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Covers the case that torch finds it dead before SIGCHLD arrives."""
    monkeypatch.setattr(dataloader._utils.signal_handling, "_set_SIGCHLD_handler", lambda: None)
    iterator = dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(iterator._try_get_data, "__defaults__", (0.1,))
    previous_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        next(Fetch(KilledWorkerDataset(), CPU, workers=1)([make_request(0, 4)]))
    except RuntimeError as error:
        said, cause = str(error), str(error.__cause__)
    finally:
        signal.signal(signal.SIGCHLD, previous_handler)
    gc.collect()  # closes the worker's pipes
    assert WORKER_KILLED.search(said)
    assert "exited unexpectedly" in cause


@pytest.mark.parametrize("error_type", [ConnectionResetError, EOFError, FileNotFoundError])
def test_reports_worker_killed_during_transfer(
    error_type: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends before the process, and torch reports only that."""
    fork = multiprocessing.get_context("fork")
    worker = fork.Process(target=time.sleep, args=(60,), daemon=True)

    class FakeIterator:
        _workers = (worker,)

        def __iter__(self) -> FakeIterator:
            return self

        def __next__(self) -> object:
            threading.Timer(0.2, worker.kill).start()
            raise error_type

    fetcher = Fetch(NoisyDataset(), CPU, workers=1)
    monkeypatch.setattr(fetch, "DataLoader", lambda *_, **__: FakeIterator())
    worker.start()
    with pytest.raises(RuntimeError) as caught:
        next(fetcher([make_request(0, 4)]))
    assert WORKER_KILLED.search(str(caught.value))
    worker.join()


@pytest.mark.parametrize("workers", [0, 1])
def test_custom_collate_of_dictionaries(workers: int) -> None:
    fetch = Fetch(DictDataset(), CPU, workers, pad_rows)
    ((_, (batch_data,)),) = fetch([make_request(2, 4)])
    assert batch_data["ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    batch = Batch((batch_data,), 2, 2, np.array([3, 2]), 4)
    assert dict(**batch)["ids"] is batch["ids"] is batch_data["ids"]


def test_custom_collate_of_tensor_dataset() -> None:
    data = TensorDataset(torch.arange(4))
    ((_, batch_data),) = Fetch(
        data, CPU, collate=lambda rows: torch.stack([r[0] * 2 for r in rows])
    )([make_request(1, 3)])
    assert batch_data[0].tolist() == [4, 2]


@pytest.mark.parametrize("data", [DataLoader(TensorDataset(torch.zeros(3))), iter([1, 2])])
def test_rejects_dataset_without_length(data: Any) -> None:
    with pytest.raises(SettingError, match="data set with a length"):
        Fetch(data, CPU)


def test_device_copies_use_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from other memory would not be asynchronous, although it is requested as such."""
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


def test_device_copies_run_on_separate_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computing stream waits for each batch, then keeps its memory alive."""
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

    compute_stream = Stream(None)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: compute_stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: said.append("held"))
    monkeypatch.setattr("paceline.train.data.fetch._to_device", lambda value, device, pins: value)
    fetch = Fetch(SlowDataset(), torch.device("cuda"))
    received = [
        (tag, data[0].tolist()) for tag, data in fetch([make_request(0, 2), make_request(2, 4)])
    ]
    assert received == [(0, [1, 0]), (2, [3, 2])]
    expected_calls = [("wait", 1), "held", ("wait", 2), "held"]
    assert [call for call in said if call != "copied"] == expected_calls
    assert all(said.index("copied") < said.index(call) for call in expected_calls)


def test_loader_does_not_consume_script_generators() -> None:
    """Resuming an epoch creates a new iterator, which must not draw from these generators."""
    fetch = Fetch(NoisyDataset(), CPU, workers=1)
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    list(fetch([make_request(0, 4)]))
    list(fetch([make_request(4, 8)]))
    assert torch.rand(()) == expected
    fetch._loader = None
