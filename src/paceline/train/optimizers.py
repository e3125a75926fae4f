"""torch's optimizers by name."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.spec.errors import SettingError

NAMES = ("adamw", "adam", "sgd")


def optimizer(
    name: str, module: nn.Module, lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0
) -> Optimizer:
    """An optimizer over the module's trainable parameters.

    Args:
        name: One of :data:`NAMES`.
        module: Already in its place; frozen parameters stay out.
        lr: Learning rate.
        momentum: Of sgd (Nesterov's when it is not 0); first moment of the others.
        weight_decay: Decoupled in adamw, added to the gradient elsewhere.

    Raises:
        SettingError: Unknown name.
    """
    parameters = [one for one in module.parameters() if one.requires_grad]
    if name == "sgd":
        nesterov = momentum > 0
        return SGD(parameters, lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    if name == "adam":
        return Adam(parameters, lr, betas=(momentum, 0.999), weight_decay=weight_decay)
    if name == "adamw":
        return AdamW(parameters, lr, betas=(momentum, 0.999), weight_decay=weight_decay)
    raise SettingError(f"--optimizer {name}: unknown", remedy=f"one of {', '.join(NAMES)}")
