"""Tests the search for a learning rate and batch size: its result, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and it sets a variable
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from each_case import each_case
from paceline import train
from paceline.spec.errors import SettingError
from paceline.train.measure import largest_batch as batches
from paceline.train.measure.lr_range import LrRange


@pytest.fixture
def session(tmp_path: Path) -> Iterator[train.Session]:
    with train.join(run_dir=tmp_path, seed=0) as session:
        yield session


Losses = Callable[[train.Batch], Tensor]


def prepare_training(session: train.Session, samples: int = 60) -> tuple[train.Loader, Losses]:
    """Prepares a regression that gradient descent solves with learning rates up to about 1."""
    network = session.place(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model = session.prepare(network, optimizer, schedule)
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    loader = session.loader(TensorDataset(inputs, inputs.sum(1, keepdim=True) * 3), 8, limit=4)

    def compute(batch: train.Batch) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean(1)

    return loader, compute


def train_epoch(
    session: train.Session, loader: train.Loader, compute: Losses
) -> tuple[list[int], Tensor]:
    """Trains for one epoch, and returns the ids of its samples and the final weights."""
    ids: list[int] = []
    for _ in session.epochs(loader, 1):
        for batch in loader:
            ids += batch.ids.tolist()
            session.step(compute(batch))
    state = session.models.module.state_dict().values()
    return ids, torch.cat([tensor.flatten() for tensor in state])


def test_search_does_not_affect_training(tmp_path: Path) -> None:
    ends = []
    for tried in (False, True):
        with train.join(run_dir=tmp_path / str(tried), seed=0) as session:
            loader, compute = prepare_training(session)
            if tried:
                result = train.find_lr(session, loader, compute, steps=30)
                assert len(result.rates) > 10
                assert train.find_batch(session, loader, compute).fits == 60
                assert not session.models.first.optimizer.state
            ends.append(train_epoch(session, loader, compute))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_suggests_working_learning_rate(session: train.Session) -> None:
    loader, compute = prepare_training(session)
    result = train.find_lr(session, loader, compute, lowest=1e-5, highest=100, steps=80)
    assert result.suggestion is not None
    assert 1e-3 < result.suggestion <= result.lowest < 1
    assert result.rates[-1] < 100  # it ended when the loss diverged
    assert f"--lr {result.suggestion:.2g}" in str(result)
    table = (session.folder / "lr-range.csv").read_text().splitlines()
    assert table[0] == "lr,loss,smoothed"
    assert len(table) == len(result.rates) + 1
    assert (session.folder / "lr-range.svg").read_text().startswith("<svg ")


def test_suggestion_for_known_loss_curve() -> None:
    rates = np.geomspace(1e-6, 10, 71).tolist()
    losses = [2 - 1 / (1 + (1e-3 / rate) ** 2) + (rate / 0.5) ** 2 for rate in rates]
    result = LrRange(rates, losses)
    assert result.suggestion == pytest.approx(1e-3, rel=0.5)
    assert 0.003 < result.lowest < 0.3
    noisy = np.random.default_rng(0).normal(0.7, 0.02, 100).tolist()
    assert LrRange(np.geomspace(1e-6, 10, 100).tolist(), noisy).suggestion is None
    rising = LrRange(rates, [1 + rate for rate in rates])
    assert rising.suggestion is None
    assert "no learning rate" in str(rising)


@pytest.mark.parametrize(("lowest", "highest", "steps"), [(0, 1, 9), (1, 0.1, 9), (0.1, 1, 2)])
def test_rejects_invalid_lr_range(
    session: train.Session, lowest: float, highest: float, steps: int
) -> None:
    loader, compute = prepare_training(session)
    with pytest.raises(SettingError, match="cannot be"):
        train.find_lr(session, loader, compute, lowest=lowest, highest=highest, steps=steps)


@each_case("most", [0, 1, 2, 3, 37, 64, 1000, 100_000])
@each_case("room", [0, 1, 2, 5, 36, 37, 64, 999])
def test_batch_search_approaches_limit(room: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= room

    largest_fit, smallest_failure = batches.search(fits, most)
    assert (
        largest_fit == most
        if most <= room
        else largest_fit <= room < smallest_failure <= largest_fit + 1 + largest_fit // 16
    )
    assert len(tried) == len(set(tried)) < 20
    assert max(tried, default=0) <= most


def test_find_batch_detects_memory_limit(
    session: train.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocates real memory: 16 MB for each sample, with a limit of 800 MB."""
    monkeypatch.setattr(batches, "_free_bytes", lambda: 1e9)
    loader, losses = prepare_training(session)

    def compute(batch: train.Batch) -> Tensor:
        sample_losses = losses(batch)
        return sample_losses + torch.zeros(len(sample_losses), 1 << 22).sum(1)

    result = train.find_batch(session, loader, compute)
    assert 30 <= result.fits < result.fails <= 60
    assert "0.7 GiB: 80%" in result.limit
    assert f"--micro-batch {result.fits}" in str(result)
    table = (session.folder / "batch-trials.csv").read_text().splitlines()
    assert table[0] == "samples_of_a_process,seconds,samples_per_s"
    assert table[-1].startswith(f"{result.fits},")
    assert torch.zeros(100, 1 << 22).numel()  # the limit is gone


def test_find_batch_propagates_unrelated_errors(session: train.Session) -> None:
    loader, _ = prepare_training(session)

    def compute(batch: train.Batch) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        train.find_batch(session, loader, compute)


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory",
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "XPU out of memory. Tried to allocate 2.00 GiB",
        "could not create a primitive",
    ],
)
def test_recognizes_out_of_memory_errors(message: str) -> None:
    assert batches.is_out_of_memory(RuntimeError(message))
    assert batches.is_out_of_memory(MemoryError())
