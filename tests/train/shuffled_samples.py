"""Samples for trainings whose batches must not depend on how ranks share them."""

from __future__ import annotations

from typing import Any

import torch

from paceline import train


class Shaken:
    """Samples with noise that may depend only on the sample's position in the order."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(count, 6, dtype=torch.float64, generator=generator)
        self.lengths = (1 + torch.arange(count) % 7).tolist()

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, ids: Any, draws: train.Draws | None) -> tuple[torch.Tensor, ...]:
        inputs = self.inputs[torch.from_numpy(ids)]
        targets = (inputs[:, 0] > inputs[:, 1]).long()
        noise = torch.from_numpy(draws.uniform(6)) if draws is not None else 0
        return inputs + 0.1 * noise, targets
