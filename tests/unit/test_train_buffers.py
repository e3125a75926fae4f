"""Tests that buffers are restored after a batch that does not count."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from paceline.train.elastic import committed
from paceline.train.elastic.committed import BufferSnapshot


class BufferModule(nn.Module):
    """Updates one buffer in place, replaces a second one, and creates a third."""

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


def test_restores_written_replaced_and_created_buffers() -> None:
    net = nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4), BufferModule())
    inputs, snapshot = torch.randn(5, 3), BufferSnapshot([net])
    for passes in range(6):  # before the first, there are no values
        snapshot.take()
        expected = {name: buffer.clone() for name, buffer in net.named_buffers()}
        for _ in range(2):
            net(inputs)
            snapshot.restore()
            restored = dict(net.named_buffers())
            assert restored.keys() == expected.keys()
            assert all(torch.equal(buffer, expected[name]) for name, buffer in restored.items())
        net(inputs)
        assert net[2].passes.tolist() == [passes + 1] * 2
        assert net[1].num_batches_tracked == passes + 1


def test_unwritten_large_buffers_are_not_copied() -> None:
    net = BufferModule()
    net.register_buffer("table", torch.zeros(committed._LARGE_BYTES // 4 + 1))
    snapshot = BufferSnapshot([net])

    def copies() -> int:
        copied = [note.copy for note in snapshot._notes.values()]
        return sum(buffer.numel() for buffer in copied if buffer is not None)

    for _ in range(committed._FIRST_STEPS):
        snapshot.take()
    assert copies() > len(net.table)
    snapshot.take()
    assert copies() < 10
    net.table += 1
    snapshot.take()
    net.table += 1
    snapshot.restore()
    assert net.table[0] == 1
