"""Tests what is reported of the passes over a DistributedSampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, distributed

from paceline.agent.ranks.sampler_watch import SAME_ORDER, SamplerWatch

ROWS = list(range(8))


class Script:
    """A script's loops over its data; ``reports`` are those of the watch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sampler_class = distributed.DistributedSampler
        monkeypatch.setattr(sampler_class, "__iter__", sampler_class.__iter__)  # for the restoring
        self.reports = list[dict[str, Any]]()
        self.watch = SamplerWatch(self.reports.append)
        self.watch.install(distributed)

    def loader(self, rank: int = 0, num_ranks: int = 2, *, shuffle: bool = True) -> Any:
        dataset: Any = ROWS
        sampler = distributed.DistributedSampler(dataset, num_ranks, rank, shuffle=shuffle)
        return DataLoader(dataset, batch_size=2, sampler=sampler)

    def train(self, batches: Any) -> list[int]:
        """Trains for an epoch; returns the order of the samples."""
        order = []
        for batch in batches:
            order += batch.tolist()
            self.watch.on_step()
        return order


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def test_reports_same_order_once(script: Script) -> None:
    for batches in (script.loader(), script.loader()):
        orders = [script.train(batches) for _ in range(5)]
        assert orders == [orders[0]] * 5
        assert len(orders[0]) == 4
    assert script.reports == [{"kind": "event", "event": SAME_ORDER}]


def test_harmless_passes_are_not_reported(script: Script) -> None:
    loaders = (script.loader(shuffle=False), script.loader(num_ranks=1), script.loader(rank=1))
    for batches in (*loaders, *(script.loader() for _ in range(4))):
        for _ in range(4 if batches in loaders else 1):
            script.train(batches)
    assert not script.reports


def test_epochs_and_evaluations_are_not_reported(script: Script) -> None:
    """Evaluations may be in the middle of an epoch, and may be left early."""
    training, validation = script.loader(), script.loader()
    next(iter(training))  # the script looks at a batch
    for epoch in range(4):
        training.sampler.set_epoch(epoch)
        for _ in training:
            script.watch.on_step()
            next(iter(validation))
            torch.cat(list(validation))
    assert not script.reports
