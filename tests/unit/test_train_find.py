"""Trying learning rates and batches: what is found, and that no trace is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # as the first optimizer does; it leaves a variable behind
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


def prepared(session: train.Session, samples: int = 60) -> tuple[train.Loader, Losses]:
    """A regression that plain gradient descent solves up to a rate of about 1."""
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


def trained(
    session: train.Session, loader: train.Loader, compute: Losses
) -> tuple[list[int], Tensor]:
    """The ids that a whole training then visits, and the weights at its end."""
    ids: list[int] = []
    for _ in session.epochs(loader, 1):
        for batch in loader:
            ids += batch.ids.tolist()
            session.step(compute(batch))
    state = session.models.module.state_dict().values()
    return ids, torch.cat([one.flatten() for one in state])


def test_the_training_afterwards_is_the_same(tmp_path: Path) -> None:
    ends = []
    for tried in (False, True):
        with train.join(run_dir=tmp_path / str(tried), seed=0) as session:
            loader, compute = prepared(session)
            if tried:
                found = train.find_lr(session, loader, compute, steps=30)
                assert len(found.rates) > 10
                assert train.find_batch(session, loader, compute).fits == 60
                assert not session.models.first.optimizer.state
            ends.append(trained(session, loader, compute))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_a_rate_that_works_is_suggested(session: train.Session) -> None:
    loader, compute = prepared(session)
    found = train.find_lr(session, loader, compute, lowest=1e-5, highest=100, steps=80)
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion <= found.lowest < 1
    assert found.rates[-1] < 100  # it ended when the loss was hopeless
    assert f"--lr {found.suggestion:.2g}" in str(found)
    table = (session.folder / "lr-range.csv").read_text().splitlines()
    assert table[0] == "lr,loss,smoothed"
    assert len(table) == len(found.rates) + 1
    assert (session.folder / "lr-range.svg").read_text().startswith("<svg ")


def test_the_rate_of_a_known_curve() -> None:
    rates = np.geomspace(1e-6, 10, 71).tolist()
    losses = [2 - 1 / (1 + (1e-3 / rate) ** 2) + (rate / 0.5) ** 2 for rate in rates]
    found = LrRange(rates, losses)
    assert found.suggestion == pytest.approx(1e-3, rel=0.5)
    assert 0.003 < found.lowest < 0.3
    noisy = np.random.default_rng(0).normal(0.7, 0.02, 100).tolist()
    assert LrRange(np.geomspace(1e-6, 10, 100).tolist(), noisy).suggestion is None
    rising = LrRange(rates, [1 + rate for rate in rates])
    assert rising.suggestion is None
    assert "no learning rate" in str(rising)


@pytest.mark.parametrize(("lowest", "highest", "steps"), [(0, 1, 9), (1, 0.1, 9), (0.1, 1, 2)])
def test_a_test_that_cannot_be(
    session: train.Session, lowest: float, highest: float, steps: int
) -> None:
    loader, compute = prepared(session)
    with pytest.raises(SettingError, match="cannot be"):
        train.find_lr(session, loader, compute, lowest=lowest, highest=highest, steps=steps)


@each_case("most", [0, 1, 2, 3, 37, 64, 1000, 100_000])
@each_case("room", [0, 1, 2, 5, 36, 37, 64, 999])
def test_the_search_comes_near(room: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= room

    good, bad = batches.search(fits, most)
    assert good == most if most <= room else good <= room < bad <= good + 1 + good // 16
    assert len(tried) == len(set(tried)) < 20
    assert max(tried, default=0) <= most


def test_a_full_memory_is_found(session: train.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real memory: 16 megabytes for each sample, and 800 in all."""
    monkeypatch.setattr(batches, "_free_bytes", lambda: 1e9)
    loader, losses = prepared(session)

    def compute(batch: train.Batch) -> Tensor:
        each = losses(batch)
        return each + torch.zeros(len(each), 1 << 22).sum(1)

    found = train.find_batch(session, loader, compute)
    assert 30 <= found.fits < found.fails <= 60
    assert "0.7 GiB: 80%" in found.limit
    assert f"--micro-batch {found.fits}" in str(found)
    table = (session.folder / "batch-trials.csv").read_text().splitlines()
    assert table[0] == "samples_of_a_process,seconds,samples_per_s"
    assert table[-1].startswith(f"{found.fits},")
    assert torch.zeros(100, 1 << 22).numel()  # the limit is gone


def test_other_errors_are_not_taken_for_a_full_memory(session: train.Session) -> None:
    loader, _ = prepared(session)

    def compute(batch: train.Batch) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        train.find_batch(session, loader, compute)


@pytest.mark.parametrize(
    "words",
    [
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory",
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "XPU out of memory. Tried to allocate 2.00 GiB",
        "could not create a primitive",
    ],
)
def test_words_of_a_full_memory(words: str) -> None:
    assert batches.is_out_of_memory(RuntimeError(words))
    assert batches.is_out_of_memory(MemoryError())
