"""Muon for the matrices of a network, beside another optimizer for the other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

MATCHED_RMS = 0.2
"""Root mean square of AdamW's updates, with a learning rate of 1 (Liu et al. 2025)."""
_NEWTON_SCHULZ_STEPS = 5


class MuonWithAuxiliary(Optimizer):
    """Trains matrices with Muon and other parameters with another optimizer, as one optimizer.

    Muon's updates are scaled to the size of AdamW's, so that both take the same learning rate.

    Args:
        auxiliary: Optimizer of one group with all other parameters.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], auxiliary: Optimizer) -> None:
        group = auxiliary.param_groups[0]
        self._auxiliary = auxiliary
        self._muon = DeviceMuon(matrices, group["lr"], group["weight_decay"])
        super().__init__([self._muon.param_groups[0], group], {"differentiable": False})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Changes all parameters that have a gradient."""
        # Loading a state replaces groups and state: they are given to both optimizers anew.
        for optimizer, group in zip((self._muon, self._auxiliary), self.param_groups, strict=True):
            optimizer.param_groups, optimizer.state = [group], self.state
            optimizer.step()


class DeviceMuon(Muon):
    """torch's Muon, computed on CPUs in the precision of the parameters.

    torch computes in bfloat16, which takes several times as long on CPUs that do not have it.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Changes all matrices that have a gradient."""
        for group in self.param_groups:
            parameters, gradients, averages = list[Tensor](), list[Tensor](), list[Tensor]()
            self._init_group(group, parameters, gradients, averages)
            momentum, lr = group["momentum"], group["lr"]
            for parameter, gradient, average in zip(parameters, gradients, averages, strict=True):
                average.lerp_(gradient, 1 - momentum)
                update = orthogonalize(gradient.lerp(average, momentum), group["ns_coefficients"])
                parameter.mul_(1 - lr * group["weight_decay"])
                scale = MATCHED_RMS * math.sqrt(max(parameter.shape))
                parameter.add_(update, alpha=-lr * scale)


def orthogonalize(matrix: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Returns the matrix with singular values near 1, by Newton-Schulz iterations (Jordan 2024)."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).clone()
    x = x if x.device.type == "cpu" else x.bfloat16()
    x /= x.norm().clamp(min=1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        products = x @ x.T
        x = torch.addmm(x, torch.addmm(products, products, products, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
