"""How large gradients, weights and updates are: where a training learns, and where it does not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from paceline.train import parallel


class Norms:
    """Measured around one step of an optimizer; made right before it, with unscaled gradients.

    A collective where parameters are sharded.

    Args:
        optimizer: Whose parameters are looked at; each of several groups also by itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [[*group["params"]] for group in optimizer.param_groups]
        every = [one for group in groups for one in group]
        self._groups = {"": every}
        if len(groups) > 1:
            self._groups |= {f"_group{number}": group for number, group in enumerate(groups)}
        self._gradients = {
            name: _norm(one.grad for one in group if one.grad is not None)
            for name, group in self._groups.items()
        }
        self._before = {one: one.detach().clone() for one in every}

    def figures(self) -> dict[str, float]:
        """Norm of the gradient before clipping and of the weights before the step, and how much
        of the latter the step has changed; called right after the step."""
        found: dict[str, float] = {}
        for name, group in self._groups.items():
            weights = _norm(self._before[one] for one in group)
            changes = _norm(one.detach() - self._before[one] for one in group)
            found[f"grad_norm{name}"] = self._gradients[name]
            found[f"weight_norm{name}"] = weights
            found[f"update_ratio{name}"] = changes / max(weights, torch.finfo(torch.float32).tiny)
        return found


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(parallel.whole_tensor(get_total_norm(tensors)))
