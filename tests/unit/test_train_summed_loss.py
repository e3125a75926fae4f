"""Tests which losses are recognised as sums over the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.train.measure.summed_loss import is_summed

SAMPLES = 4
NETWORK = nn.Linear(3, 5)
INPUTS, TARGETS = torch.randn(SAMPLES, 3), torch.rand(SAMPLES, 5)
LABELS = torch.tensor([0, 1, 0, 3])

Loss = Callable[[Tensor], Tensor]


def squares(outputs: Tensor) -> Tensor:
    return (outputs - TARGETS) ** 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: squares(outputs).sum(),
        lambda outputs: squares(outputs).mean(1).sum(),
        lambda outputs: (outputs - TARGETS).abs().sum((0, 1)),
        lambda outputs: functional.mse_loss(outputs, TARGETS, reduction="sum"),
        lambda outputs: functional.cross_entropy(outputs, LABELS, reduction="none").sum(),
        lambda outputs: functional.cross_entropy(outputs, LABELS, reduction="sum"),
        lambda outputs: (
            functional.binary_cross_entropy_with_logits(outputs, TARGETS, reduction="sum")
            + NETWORK.weight.square().mean()
        ),
    ],
)
def test_sum_over_samples_is_found(loss: Loss) -> None:
    assert is_summed(loss(NETWORK(INPUTS)), SAMPLES)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: squares(outputs).mean(),
        lambda outputs: squares(outputs).mean() + outputs.abs().mean(),
        lambda outputs: torch.stack([outputs[n].mean() for n in range(SAMPLES)]).sum(),
        lambda outputs: sum(outputs.mean() for _ in range(2000)),
        lambda outputs: squares(outputs).mean(0).sum(),
        lambda outputs: squares(outputs).sum() / SAMPLES,
        lambda outputs: functional.mse_loss(outputs, TARGETS, reduction="sum") / SAMPLES,
        lambda outputs: functional.mse_loss(outputs.mean(0), TARGETS.mean(0), reduction="sum"),
        lambda outputs: squares(outputs).mean() + NETWORK.bias.square().sum(),
        lambda outputs: outputs[:3].sum(),
        lambda outputs: outputs.mean().detach(),
    ],
)
def test_other_loss_is_no_sum_over_samples(loss: Loss) -> None:
    assert not is_summed(loss(NETWORK(INPUTS)), SAMPLES)


def test_sum_of_one_sample_is_its_mean() -> None:
    assert not is_summed(NETWORK(INPUTS[:1]).sum(), 1)
