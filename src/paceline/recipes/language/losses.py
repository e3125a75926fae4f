"""Losses of fine-tuning: of trained tokens, and of preferences."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, pad

from paceline import train
from paceline.recipes.language.rows import IGNORED


def example_losses(logits: Tensor, labels: Tensor, examples: Tensor, count: int) -> Tensor:
    """Returns the loss of each example, summed over its tokens, shape ``[count]``.

    Args:
        logits: Scores of the next token, shape ``[rows, length, vocabulary]``.
        labels: The tokens, or ``IGNORED``, shape ``[rows, length]``; not shifted.
        examples: Number of each token's example, shape ``[rows, length]``.
    """
    is_target = labels[:, 1:] != IGNORED
    # Scores without those of the last token would be copied once more in the backward pass.
    scores = logits[pad(is_target, (0, 1))]
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    losses = cross_entropy(scores, labels[:, 1:][is_target], reduction="none")
    return losses.new_zeros(count).index_add(0, examples[:, 1:][is_target], losses)


def target_weight(loader: train.Loader, batch: train.Batch, targets: NDArray[np.int64]) -> float:
    """Returns the factor that turns sums over an example's tokens into losses for ``step``.

    ``session.step`` divides by the examples of the global batch, this by its trained tokens, also
    those of other ranks and of other parts of the batch: the order of samples is known everywhere.

    Args:
        targets: Trained tokens of each example of the data.
    """
    assert batch.draws is not None  # of a training
    positions = np.arange(batch.stop - batch.total, batch.stop)
    ids = loader.order.at(batch.draws.epoch, positions)
    return batch.total / int(targets[ids].sum())


def preference_losses(
    losses: Tensor, references: Tensor, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of each pair of answers by DPO (Rafailov et al. 2023), shape ``[n]``.

    Args:
        losses: Those of :func:`example_losses`, the chosen and the rejected answer in turn, shape
            ``[2 n]``: negative logarithms of the answers' probabilities.
        references: The same of the model before the training, shape ``[n, 2]``.
        beta: How strongly the model is kept close to that model.

    Returns:
        The losses, and for each pair the margin between the rewards of both answers, and whether
        the chosen one has the greater reward.
    """
    rewards = beta * (references.to(losses) - losses.view(-1, 2))
    margins = rewards[:, 0] - rewards[:, 1]
    values = {"reward_accuracy": (margins > 0).to(margins), "reward_margin": margins}
    return -logsigmoid(margins), {name: value.detach() for name, value in values.items()}
