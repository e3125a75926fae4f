"""Batch size, optimizer and learning-rate schedule of a training.

The global batch stays the same when the number of processes changes. With a fixed batch for each
process the global batch grows with the world size, and the learning rate may grow with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.recipes.options import Options, parse_micro_batch

_FUSED_DEVICES = ("cpu", "cuda", "xpu")
"""Devices with fused kernels of all three optimizers."""
_STEP_FACTOR = 0.1


@dataclass(frozen=True, slots=True)
class Batching:
    """Batch and learning rate of a step.

    Attributes:
        global_batch: Samples of one optimizer step over all ranks.
        limit: Maximum samples that one rank computes at once; 0 means its whole share.
        factor: Scale that ``lr`` includes.
    """

    global_batch: int
    ranks: int
    limit: int
    lr: float
    factor: float = 1.0

    @property
    def share(self) -> int:
        """Maximum samples of one rank in one step."""
        return -(-self.global_batch // self.ranks)

    @property
    def pieces(self) -> int:
        """Number of micro-batches of one rank in one step."""
        return -(-self.share // self.limit) if self.limit else 1

    def describe(self) -> str:
        """Returns a one-line description."""
        ranks = f"{self.ranks} process{'es' * (self.ranks > 1)}"
        prefix = "" if self.global_batch % self.ranks == 0 else "at most "
        pieces = f" in {self.pieces} pieces" if self.pieces > 1 else ""
        scaled = "" if self.factor == 1 else f" (scaled by {self.factor:.4g})"
        return (
            f"batch {self.global_batch} = {ranks} × {prefix}{self.share}{pieces},"
            f" learning rate {self.lr:.4g}{scaled}"
        )


def compute_batching(ranks: int, options: Options) -> Batching:
    """Computes the batch and the learning rate for a number of ranks."""
    batch = options.batch_per_process * ranks or options.global_batch
    ratio = batch / options.global_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[options.scale_lr]
    limit = parse_micro_batch(options.micro_batch)
    limit = limit if isinstance(limit, int) else 0
    return Batching(batch, ranks, limit, options.lr * factor, factor)


def make_optimizer(
    options: Options, module: nn.Module, lr: float, excluded: Collection[nn.Parameter] = ()
) -> Optimizer:
    """Creates the optimizer over the trainable parameters of a network, already on its device.

    Args:
        excluded: Parameters for which there is another optimizer.
    """
    excluded_ids = {id(parameter) for parameter in excluded}
    parameters = [p for p in module.parameters() if p.requires_grad and id(p) not in excluded_ids]
    # Six times faster on a CPU than torch's default loop.
    fused = all(parameter.device.type in _FUSED_DEVICES for parameter in parameters)
    momentum, decay = options.momentum, options.weight_decay
    if options.optimizer == "sgd":
        nesterov = options.nesterov and momentum > 0
        return SGD(parameters, lr, momentum, weight_decay=decay, nesterov=nesterov, fused=fused)
    kind: type[Adam] = {"adam": Adam, "adamw": AdamW}[options.optimizer]
    return kind(parameters, lr, betas=(momentum, 0.999), weight_decay=decay, fused=fused)


class Curve:
    """Factor of the learning rate at each step.

    Its state is in ``__dict__``, which torch saves with the schedule. Its settings are in slots, so
    that a resumed run may have more steps.

    Args:
        name: ``cosine``, ``linear``, ``inverse-sqrt``, ``constant``, ``step``, ``plateau`` or
            ``stable``.
        steps: Global steps of the training.
        warm_up: Fraction of the steps over which the rate rises from zero.
        patience: Evaluations without a lower loss after which ``plateau`` divides by ten.
        milestones: Fractions of the training after which ``step`` divides by ten.
        cool_down: Fraction of the steps over which ``stable`` falls to zero.

    Attributes:
        step_offset: Added to the global step. It is not 0 if a resumed training has made some of
            its steps with another batch: the curve follows the epochs then.
    """

    __slots__ = (
        *("__dict__", "cool_down_steps", "milestones", "name", "patience", "steps"),
        *("step_offset", "warm_up_steps"),
    )

    def __init__(
        self,
        name: str,
        steps: int,
        warm_up: float,
        patience: int = 3,
        milestones: Sequence[float] = (0.5, 0.75),
        cool_down: float = 0.2,
    ) -> None:
        self.name, self.steps, self.patience, self.step_offset = name, steps, patience, 0
        self.milestones = tuple(milestones)
        self.warm_up_steps, self.cool_down_steps = round(steps * warm_up), round(steps * cool_down)
        self.scale, self.best, self.stale = 1.0, math.inf, 0

    def __call__(self, step: int) -> float:
        """Returns the factor at a global step."""
        step += self.step_offset
        if step < self.warm_up_steps:
            return (step + 1) / self.warm_up_steps
        if self.name == "inverse-sqrt":
            return math.sqrt(max(self.warm_up_steps, 1) / (step + 1))
        progress = min(1.0, (step - self.warm_up_steps) / max(1, self.steps - self.warm_up_steps))
        if self.name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if self.name == "linear":
            return 1 - progress
        if self.name == "stable":
            return min(1.0, max(0, self.steps - step) / max(1, self.cool_down_steps))
        if self.name == "step":
            return float(
                _STEP_FACTOR ** sum(progress >= milestone for milestone in self.milestones)
            )
        return self.scale

    def report(self, loss: float) -> None:
        """Records the loss of an evaluation; only ``plateau`` uses it."""
        if self.name != "plateau":
            return
        self.best, self.stale = (loss, 0) if loss < self.best else (self.best, self.stale + 1)
        if self.stale >= self.patience:
            self.scale, self.stale = self.scale * _STEP_FACTOR, 0
