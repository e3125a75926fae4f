"""Buffers that go back to what they were before a batch that does not count."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from paceline.train.elastic import committed
from paceline.train.elastic.committed import BufferSnapshot


class Keeping(nn.Module):
    """Writes a buffer, puts another tensor in the place of a second, and makes a third."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(2))
        self.register_buffer("heat", torch.ones(()))
        self.register_buffer("seen", None)

    def forward(self, values: Tensor) -> Tensor:
        self.passes += 1
        self.heat = self.heat * 0.9
        self.seen = values.detach().mean(0) if self.seen is None else self.seen + 1
        return values


def test_buffers_go_back_whatever_a_pass_did_to_them() -> None:
    net = nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4), Keeping())
    inputs, noted = torch.randn(5, 3), BufferSnapshot([net])
    for passes in range(6):  # first of which nothing has been seen yet
        noted.take()
        before = {name: one.clone() for name, one in net.named_buffers()}
        for _ in range(2):
            net(inputs)
            noted.restore()
            after = dict(net.named_buffers())
            assert after.keys() == before.keys()
            assert all(torch.equal(one, before[name]) for name, one in after.items())
        net(inputs)
        assert net[2].passes.tolist() == [passes + 1] * 2
        assert net[1].num_batches_tracked == passes + 1


def test_large_buffers_that_nothing_writes_cost_no_copy() -> None:
    net = Keeping()
    net.register_buffer("table", torch.zeros(committed._LARGE_BYTES // 4 + 1))
    noted = BufferSnapshot([net])

    def copies() -> int:
        kept = [note.copy for note in noted._notes.values()]
        return sum(one.numel() for one in kept if one is not None)

    for _ in range(committed._FIRST_STEPS):
        noted.take()
    assert copies() > len(net.table)
    noted.take()
    assert copies() < 10
    net.table += 1
    noted.take()
    net.table += 1
    noted.restore()
    assert net.table[0] == 1
