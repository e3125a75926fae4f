"""What a fine-tuning minimises and what its evaluation reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline import train
from paceline.recipes.language.losses import example_losses, preference_losses, target_weight


class Objective(Protocol):
    """An objective for the samples of one part of the data."""

    def losses(
        self, logits: Tensor, batch: train.Batch, loader: train.Loader | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each sample for ``session.step``, and further values by name.

        Args:
            loader: Loader of the batch; ``None`` for a trial, which has batches of its own.
        """
        ...

    def measure(self, logits: Tensor, batch: train.Batch) -> dict[str, Tensor]:
        """Returns values of each sample by name, whose sums an evaluation takes."""
        ...

    def figures(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Returns the figures of an evaluation from the sums over ``count`` samples."""
        ...


@dataclass(frozen=True)
class TokenLoss:
    """Cross-entropy in which every trained token has the same weight.

    Attributes:
        targets: Trained tokens of each example.
    """

    targets: NDArray[np.int64]

    def losses(
        self, logits: Tensor, batch: train.Batch, loader: train.Loader | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns losses whose mean over a global batch is that over its trained tokens."""
        losses = _example_losses(logits, batch, len(batch.ids))
        if loader is None:  # every example counts as an average one
            return losses / float(self.targets.mean()), {}
        return losses * target_weight(loader, batch, self.targets), {}

    def measure(self, logits: Tensor, batch: train.Batch) -> dict[str, Tensor]:
        """Returns loss and number of trained tokens of each example."""
        losses = _example_losses(logits, batch, len(batch.ids))
        return {"loss": losses, "tokens": torch.from_numpy(self.targets[batch.ids])}

    def figures(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Returns loss per trained token and perplexity."""
        loss = sums["loss"] / sums["tokens"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


@dataclass(frozen=True)
class PreferenceLoss:
    """DPO: the mean loss of pairs.

    Attributes:
        references: Losses of both answers by the model before the training, shape ``[pairs, 2]``.
    """

    references: Tensor
    beta: float

    def losses(
        self, logits: Tensor, batch: train.Batch, loader: train.Loader | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each pair, with accuracy and margin of its rewards."""
        losses = _example_losses(logits, batch, 2 * len(batch.ids))
        references = self.references[torch.from_numpy(batch.ids)]
        return preference_losses(losses, references, self.beta)

    def measure(self, logits: Tensor, batch: train.Batch) -> dict[str, Tensor]:
        """Returns loss, accuracy and margin of each pair."""
        losses, values = self.losses(logits, batch, None)
        return {"loss": losses, **values}

    def figures(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Returns the mean of each value."""
        return {name: total / count for name, total in sums.items()}


def _example_losses(logits: Tensor, batch: train.Batch, count: int) -> Tensor:
    _, _, labels, examples = batch
    return example_losses(logits, labels, examples, count)
