"""How large gradients, weights and updates are: where a training learns, and where it does not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from paceline.train import parallel


class Norms:
    """Norms around one optimizer step; made right before it, with unscaled gradients.

    A collective where parameters are sharded.

    Args:
        optimizer: Whose parameters are looked at; each of several groups also by itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [[*group["params"]] for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group]
        self._groups = {"": parameters}
        if len(groups) > 1:
            self._groups |= {f"_group{number}": group for number, group in enumerate(groups)}
        self._gradients = {
            name: _norm(parameter.grad for parameter in group if parameter.grad is not None)
            for name, group in self._groups.items()
        }
        self._former_weights = {parameter: parameter.detach().clone() for parameter in parameters}

    def figures(self) -> dict[str, float]:
        """Norm of the gradient before clipping and of the weights before the step, and how much
        of the latter the step has changed; called right after the step."""
        figures: dict[str, float] = {}
        for name, group in self._groups.items():
            weights = _norm(self._former_weights[parameter] for parameter in group)
            changes = _norm(
                parameter.detach() - self._former_weights[parameter] for parameter in group
            )
            figures[f"grad_norm{name}"] = self._gradients[name]
            figures[f"weight_norm{name}"] = weights
            figures[f"update_ratio{name}"] = changes / max(weights, torch.finfo(torch.float32).tiny)
        return figures


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(parallel.full_tensor(get_total_norm(tensors)))
