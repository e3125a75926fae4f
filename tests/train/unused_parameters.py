"""A network that leaves some parameters without a gradient in some steps."""

from __future__ import annotations

import torch
from torch import nn


class Branches(nn.Module):
    """Uses one of its two layers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
        outputs: torch.Tensor = (self.other if step % 3 == 1 else self.one)(inputs)
        return outputs
