"""What the options say of a step: its batch at this world size, its optimizer, its learning rate.

The global batch is the unit: it stays when the number of processes changes. Who fixes the batch
of each process instead gets a global batch that grows with the world, and may have the learning
rate grow with it. Either way the outcome is printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.spec.errors import SettingError

RULES = ("none", "linear", "sqrt")
OPTIMIZERS = ("adamw", "adam", "sgd")
FUSED = ("cpu", "cuda", "xpu")
"""Devices for which torch has fused kernels of all three."""
SCHEDULES = ("cosine", "linear", "inverse-sqrt", "constant", "step", "plateau")
MILESTONES = (0.5, 0.75)  # of the training, where ``step`` divides by ten
_DIVIDE = 0.1


@dataclass(frozen=True, slots=True)
class Batching:
    """What a step computes.

    Attributes:
        global_batch: Samples of one optimizer step over all ranks.
        ranks: Number of processes.
        limit: Most samples that one rank computes at once; 0 means its whole share.
        lr: Highest learning rate.
        factor: By how much the learning rate was scaled.
    """

    global_batch: int
    ranks: int
    limit: int
    lr: float
    factor: float = 1.0

    @property
    def share(self) -> int:
        """Most samples of one rank in one step."""
        return -(-self.global_batch // self.ranks)

    @property
    def pieces(self) -> int:
        """Forward and backward passes of one rank in one step."""
        return -(-self.share // self.limit) if self.limit else 1

    def describe(self) -> str:
        """One line for people."""
        ranks = f"{self.ranks} process{'es' * (self.ranks > 1)}"
        most = "" if self.global_batch % self.ranks == 0 else "at most "
        pieces = f" in {self.pieces} pieces" if self.pieces > 1 else ""
        scaled = "" if self.factor == 1 else f" (scaled by {self.factor:.4g})"
        return (
            f"batch {self.global_batch} = {ranks} × {most}{self.share}{pieces},"
            f" learning rate {self.lr:.4g}{scaled}"
        )


def batching(
    ranks: int,
    *,
    global_batch: int,
    lr: float,
    per_rank: int = 0,
    limit: int = 0,
    rule: str = "none",
) -> Batching:
    """The batch and the learning rate for a number of ranks.

    Args:
        ranks: Number of processes.
        global_batch: Samples of one step; with ``per_rank`` only the batch that ``lr`` is for.
        lr: Learning rate for ``global_batch``.
        per_rank: Samples of each rank in one step instead; 0 keeps the global batch.
        limit: Most samples that one rank computes at once (memory); 0 means no limit.
        rule: How the learning rate follows the batch: ``none``, ``linear`` or ``sqrt``.

    Raises:
        SettingError: Unknown rule, or one without anything to scale by.
    """
    if rule not in RULES:
        raise SettingError(f"--scale-lr {rule}: unknown", remedy=f"one of {', '.join(RULES)}")
    if rule != "none" and not per_rank:
        raise SettingError(
            f"--scale-lr {rule} has nothing to scale by",
            found="the global batch is the same at any number of processes",
            remedy="--batch-per-process N lets the batch grow, or --scale-lr none",
        )
    actual = per_rank * ranks or global_batch
    ratio = actual / global_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
    return Batching(actual, ranks, limit, lr * factor, factor)


def optimizer(
    name: str,
    module: nn.Module,
    lr: float,
    *,
    momentum: float = 0.9,
    nesterov: bool = True,
    weight_decay: float = 0.0,
) -> Optimizer:
    """An optimizer over the module's trainable parameters.

    Args:
        name: One of :data:`OPTIMIZERS`.
        module: Already in its place; frozen parameters stay out.
        lr: Learning rate.
        momentum: Of sgd; first moment of the others.
        nesterov: Nesterov's momentum in sgd, where there is momentum.
        weight_decay: Decoupled in adamw, added to the gradient elsewhere.

    Raises:
        SettingError: Unknown name.
    """
    parameters = [one for one in module.parameters() if one.requires_grad]
    # One kernel for each tensor: six times faster on a CPU than the loop that is torch's default.
    fused = all(one.device.type in FUSED for one in parameters)
    if name == "sgd":
        return SGD(
            parameters,
            lr,
            momentum=momentum,
            nesterov=nesterov and momentum > 0,
            weight_decay=weight_decay,
            fused=fused,
        )
    kinds: dict[str, type[Adam]] = {"adam": Adam, "adamw": AdamW}
    if name not in kinds:
        raise SettingError(f"--optimizer {name}: unknown", remedy=f"one of {', '.join(OPTIMIZERS)}")
    betas = (momentum, 0.999)
    return kinds[name](parameters, lr, betas=betas, weight_decay=weight_decay, fused=fused)


class Curve:
    """A learning rate's course.

    What it learned on the way is in its ``__dict__``, which torch saves with the schedule; what
    it was made with is in slots, so that a resumed run may have more steps.

    Args:
        name: One of :data:`SCHEDULES`.
        steps: Global steps of the training.
        warm_up: Part of them over which the rate rises from zero.
        milestones: Parts of the training after which ``step`` divides by ten.
        patience: Evaluations without a better value after which ``plateau`` divides by ten.
    """

    __slots__ = ("__dict__", "milestones", "name", "patience", "steps", "warm")

    def __init__(
        self,
        name: str,
        steps: int,
        warm_up: float,
        patience: int = 3,
        milestones: Sequence[float] = MILESTONES,
    ) -> None:
        if name not in SCHEDULES:
            raise SettingError(
                f"--schedule {name}: unknown", remedy=f"one of {', '.join(SCHEDULES)}"
            )
        self.name, self.steps, self.patience = name, steps, patience
        self.milestones = tuple(milestones)
        self.warm = round(steps * warm_up)
        self.scale, self.best, self.stale = 1.0, math.inf, 0

    def __call__(self, step: int) -> float:
        """Factor of the global step ``step``."""
        if step < self.warm:
            return (step + 1) / self.warm
        if self.name == "inverse-sqrt":
            return math.sqrt(max(self.warm, 1) / (step + 1))
        done = min(1.0, (step - self.warm) / max(1, self.steps - self.warm))
        return self._falling(done)

    def _falling(self, done: float) -> float:
        if self.name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        if self.name == "linear":
            return 1 - done
        if self.name == "step":
            return float(_DIVIDE ** sum(done >= milestone for milestone in self.milestones))
        return self.scale

    def report(self, loss: float) -> None:
        """Takes the loss of an evaluation; only ``plateau`` minds."""
        if self.name != "plateau":
            return
        self.best, self.stale = (loss, 0) if loss < self.best else (self.best, self.stale + 1)
        if self.stale >= self.patience:
            self.scale, self.stale = self.scale * _DIVIDE, 0


def scheduled(optimizer: Optimizer, curve: Curve) -> LambdaLR:
    """The schedule that follows a curve, to be advanced once for each global step."""
    return LambdaLR(optimizer, curve)
