"""Checks the types that users of the training library see; mypy checks it, nothing runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from typing_extensions import assert_type

from paceline import train


class Pairs(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(2), index


class Batches:
    def __len__(self) -> int:
        return 3

    def batch(self, ids: train.Ids, draws: train.Draws | None) -> tuple[Tensor, ...]:
        return (torch.zeros(len(ids)),)


def script(session: train.Session, network: nn.Module) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    assert_type(session.place(network), nn.Module)
    assert_type(session.prepare(network, optimizer, clip_norm=1.0), nn.Module)
    loader = session.loader(TensorDataset(torch.zeros(3)), 2)
    assert_type(loader, train.Loader)
    session.loader(Pairs(), 2, limit=1, workers=0)
    session.loader(train.ShardedDataset("shards", lambda sample: train.decoded(sample)["cls"]), 2)
    assert_type(train.write_shards("shards", [{"cls": 1}]), list[Path])
    session.loader(Batches(), 2)
    session.loader(Pairs(), 2, lengths=[1, 2, 3], collate=lambda samples: torch.zeros(2))
    session.loader(Pairs(), 2, order=lambda epoch: [2, 1, 0])
    assert_type(session.epochs(loader, 2), Iterator[int])
    for batch in loader:
        assert_type(batch, train.Batch)
        assert_type(session.step(torch.zeros(2), accuracy=torch.zeros(2)), bool)
        session.update("generator", torch.zeros(2), real=torch.zeros(2))
        assert_type(session.step({"generator": torch.zeros(2)}), bool)
    average = session.average(0.99, name="generator")
    assert_type(average, train.Average)
    with average.applied() as averaged:
        assert_type(averaged, nn.Module)
    session.add(train.Callback())
    assert_type(session.checkpoints(every="10m"), bool)
    assert_type(session.together(lambda: 3), int)
    meter = session.meter()
    assert_type(meter.result(), train.Means)
    assert_type(meter.result()["loss"], float)
    session.once(Path("x"), lambda folder: None)


def opened() -> None:
    with train.join(seed=1, dtype="bf16") as session:
        assert_type(session, train.Session)
        assert_type(session.world.rank, int)
