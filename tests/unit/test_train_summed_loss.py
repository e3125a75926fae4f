"""Tests which losses are recognised as sums over the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.train.summed_loss import Summed, classify_loss

SAMPLES = 4
NETWORK = nn.Linear(3, SAMPLES)  # as many outputs as samples: shapes alone do not tell
INPUTS, TARGETS = torch.randn(SAMPLES, 3), torch.rand(SAMPLES, SAMPLES)
LABELS = torch.tensor([0, 1, 0, 3])
WEIGHTS = torch.full((SAMPLES,), 1 / SAMPLES)

Loss = Callable[[Tensor], Tensor]


def squares(outputs: Tensor) -> Tensor:
    return (outputs - TARGETS) ** 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: squares(outputs).sum(),
        lambda outputs: squares(outputs).mean(1).sum(),
        lambda outputs: squares(outputs).mean(-1).sum().double(),
        lambda outputs: (outputs - TARGETS).abs().sum((0, 1)),
        lambda outputs: functional.mse_loss(outputs, TARGETS, reduction="sum"),
        lambda outputs: functional.l1_loss(outputs, TARGETS, reduction="sum"),
        lambda outputs: functional.cross_entropy(outputs, LABELS, reduction="none").sum(),
        lambda outputs: functional.cross_entropy(outputs, LABELS, reduction="sum"),
        lambda outputs: functional.cross_entropy(
            outputs, LABELS, reduction="sum", label_smoothing=0.1
        ),
        lambda outputs: functional.cross_entropy(
            outputs.reshape(-1, 2), LABELS.repeat(2) % 2, reduction="sum"
        ),
        lambda outputs: (
            functional.binary_cross_entropy_with_logits(outputs, TARGETS, reduction="sum")
            + NETWORK.weight.square().mean()
        ),
        lambda outputs: -outputs.log_softmax(1).gather(1, LABELS[:, None]).sum(),
    ],
)
def test_sum_over_samples_is_found(loss: Loss) -> None:
    assert classify_loss(loss(NETWORK(INPUTS)), SAMPLES) is Summed.YES


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: squares(outputs).mean(),
        lambda outputs: squares(outputs).mean() + outputs.abs().mean(),
        lambda outputs: torch.stack([outputs[n].mean() for n in range(SAMPLES)]).sum(),
        lambda outputs: (torch.stack([outputs.mean()] * SAMPLES) * WEIGHTS).sum(),
        lambda outputs: sum(outputs.mean() for _ in range(SAMPLES)),
        lambda outputs: squares(outputs).mean(0).sum(),
        lambda outputs: squares(outputs).mean(-2).sqrt().sum(),
        lambda outputs: squares(outputs).sum() / SAMPLES,
        lambda outputs: functional.mse_loss(outputs, TARGETS, reduction="sum") / SAMPLES,
        lambda outputs: functional.cross_entropy(outputs, LABELS, label_smoothing=0.1),
        lambda outputs: squares(outputs).mean() + NETWORK.bias.square().sum(),
        lambda outputs: outputs[:3].sum(),
        lambda outputs: outputs.mean().detach(),
    ],
)
def test_other_loss_is_no_sum_over_samples(loss: Loss) -> None:
    assert classify_loss(loss(NETWORK(INPUTS)), SAMPLES) is Summed.NO


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: (squares(outputs).mean(1) * WEIGHTS).sum(),
        lambda outputs: (squares(outputs).mean(1) / SAMPLES).sum(),
        lambda outputs: (INPUTS @ outputs[:3]).sum(),
        lambda outputs: functional.mse_loss(outputs.mean(), TARGETS.mean(), reduction="sum"),
    ],
)
def test_sum_that_may_be_a_mean_is_doubtful(loss: Loss) -> None:
    assert classify_loss(loss(NETWORK(INPUTS)), SAMPLES) is Summed.MAYBE


def test_sum_of_one_sample_is_its_mean() -> None:
    assert classify_loss(NETWORK(INPUTS[:1]).sum(), 1) is Summed.NO
