"""Learning rates over the global steps of a training."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warm_up_and_cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Linear rise over the first twentieth of ``steps``, then half a cosine down to zero."""
    warm = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))

    return LambdaLR(optimizer, factor)
