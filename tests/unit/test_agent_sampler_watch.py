"""Tests what is reported of the passes over a DistributedSampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, distributed

from paceline.agent.ranks import sampler_watch

ROWS = list(range(8))


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    sampler_class = distributed.DistributedSampler
    monkeypatch.setattr(sampler_class, "__iter__", sampler_class.__iter__)  # restored at the end
    received = list[dict[str, Any]]()
    sampler_watch.watch_samplers(received.append, distributed)
    return received


def loader(rank: int = 0, num_ranks: int = 2, *, shuffle: bool = True) -> Any:
    dataset: Any = ROWS
    sampler = distributed.DistributedSampler(dataset, num_ranks, rank, shuffle=shuffle)
    return DataLoader(dataset, batch_size=2, sampler=sampler)


def test_reports_same_order_once(reports: list[dict[str, Any]]) -> None:
    for batches in (loader(), loader()):
        orders = [torch.cat(list(batches)).tolist() for _ in range(5)]
        assert orders == [orders[0]] * 5
    assert reports == [{"kind": "event", "event": sampler_watch.SAME_ORDER}]


@pytest.mark.parametrize(
    "batches", [loader(shuffle=False), loader(num_ranks=1), loader(rank=1), [loader(), loader()]]
)
def test_harmless_passes_are_not_reported(reports: list[dict[str, Any]], batches: Any) -> None:
    for _ in range(1 if isinstance(batches, list) else 4):
        for batch in batches:
            list(batch)
    assert not reports


def test_epochs_and_evaluations_are_not_reported(reports: list[dict[str, Any]]) -> None:
    batches = loader()
    next(iter(batches))  # the script looks at a batch
    for epoch in range(4):
        batches.sampler.set_epoch(epoch)
        list(batches)
    with torch.no_grad():
        for _ in range(4):
            list(batches)
    assert not reports
