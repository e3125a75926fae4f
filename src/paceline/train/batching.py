"""Batch and learning rate at this world size, by a stated rule.

The global batch is the unit: it stays when the number of processes changes. Who fixes the batch
of each process instead gets a global batch that grows with the world, and may have the learning
rate grow with it. Either way the outcome is printed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.spec.errors import SettingError

RULES = ("none", "linear", "sqrt")


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
