"""Imported by launchers that fork their workers, before they fork: everything a rank will need.

``torch._dynamo`` is what PyTorch imports when the first optimizer is made; it takes about a
second, in every process that does not inherit it.
"""

from __future__ import annotations

import torch._dynamo
import torch.nn.parallel

import paceline.train

__all__ = ["paceline", "torch"]
