"""Tests that options for batch, optimizer and learning rate have their effect."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch._dynamo  # sets an environment variable when it is first imported
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from paceline import train
from paceline.recipes import common, parse_options
from paceline.recipes.common import unused_flags
from paceline.recipes.optimization import Curve, compute_batching, make_optimizer
from paceline.recipes.options import Options
from paceline.recipes.pretrained import gradual_unfreezing
from paceline.train.data.fetch import Fetch
from paceline.train.data.loader import Loader, Progress
from paceline.train.data.order import Order
from paceline.train.metrics import Best


def test_global_batch_is_independent_of_ranks() -> None:
    for ranks in (1, 2, 3, 16):
        batching = compute_batching(ranks, Options(global_batch=64, lr=0.1))
        assert (batching.global_batch, batching.lr) == (64, 0.1)
    assert compute_batching(3, Options(global_batch=64, lr=0.1)).describe() == (
        "batch 64 = 3 processes × at most 22, learning rate 0.1"
    )


def test_micro_batch_splits_share() -> None:
    batching = compute_batching(2, Options(global_batch=64, lr=0.1, micro_batch="10"))
    assert (batching.share, batching.pieces) == (32, 4)
    assert "2 processes × 32 in 4 pieces" in batching.describe()


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 2), ("sqrt", math.sqrt(2))])
def test_scale_lr_rules(rule: str, factor: float) -> None:
    options = Options(global_batch=64, lr=0.1, batch_per_process=32, scale_lr=rule)
    batching = compute_batching(4, options)
    assert batching.global_batch == 128
    assert batching.lr == pytest.approx(0.1 * factor)
    assert ("scaled" in batching.describe()) == (rule != "none")


@given(
    st.sampled_from(("cosine", "linear", "inverse-sqrt", "constant", "step", "plateau")),
    st.integers(1, 500),
    st.floats(0, 0.9),
)
def test_curves_stay_between_zero_and_one(name: str, steps: int, warm_up: float) -> None:
    curve = Curve(name, steps, warm_up)
    factors = [curve(step) for step in range(steps + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert max(factors[: max(1, curve.warm_up_steps)]) == 1 or curve.warm_up_steps == 0
    if name in ("cosine", "linear") and curve.warm_up_steps < steps:
        assert factors[-1] == pytest.approx(0, abs=1e-12)


def test_plateau_reduces_rate_without_improvement() -> None:
    curve = Curve("plateau", 100, 0.0, patience=2)
    for loss in (1.0, 0.5, 0.6, 0.6):
        curve.report(loss)
    assert curve(50) == pytest.approx(0.1)


@pytest.mark.parametrize("batch", [5, 10, 25])
def test_schedule_follows_epochs_after_batch_size_change(batch: int) -> None:
    """Position and length are the same as in a training with this batch size from the start."""
    progress = Progress(step=15, epoch=1, offset=50)  # 100 samples in batches of 10
    fetch = Fetch(TensorDataset(torch.zeros(100)), torch.device("cpu"))
    loader = Loader(fetch, Order(100, 0), lambda: (0, 1), batch, 0, progress)
    options = Options(epochs=4, schedule="linear", warm_up=0.0)
    curve = common.make_curve(options, loader)
    stages = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    optimizer = SGD(stages.parameters())
    schedule = gradual_unfreezing(optimizer, curve, [*stages[:2]], len(loader))
    delayed, schedule.last_epoch = schedule.lr_lambdas, 15  # as loaded from a checkpoint
    session = cast(train.Session, SimpleNamespace(progress=progress, epochs=lambda *_, every: [1]))
    assert [*common.epochs(session, loader, options, curve, schedule, Best())] == [1]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3 * curve(15)] * 2 + [0]
    assert curve(15) == pytest.approx(1 - 1.5 / 4)
    assert curve(15 + loader.steps_left(4)) == 0
    assert [factor(15) for factor in delayed] == [curve(15), curve(15), 0]  # in the second epoch

    curve.step_offset, options = 0, Options(steps=40)  # with --steps, the global step counts
    assert [*common.epochs(session, loader, options, curve, schedule, Best())] == [1]
    assert curve.step_offset == 0


def test_schedule_state_round_trip() -> None:
    def built() -> tuple[Curve, LambdaLR]:
        module = nn.Linear(1, 1)
        curve = Curve("plateau", 100, 0.1)
        return curve, LambdaLR(make_optimizer(Options(optimizer="sgd"), module, 0.1), curve)

    curve, schedule = built()
    curve.scale, curve.best = 0.01, 0.3
    other, restored = built()
    restored.load_state_dict(schedule.state_dict())
    assert (other.scale, other.best) == (0.01, 0.3)


def test_warm_up_length_is_not_restored() -> None:
    """Resuming restores only decisions that depend on losses, not settings."""
    first, longer = (
        LambdaLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), Curve("cosine", steps, 0.1))
        for steps in (100, 200)
    )
    longer.load_state_dict(first.state_dict())
    assert longer.lr_lambdas[0].warm_up_steps == 20


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_optimizer_excludes_frozen_parameters(name: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    module[0].requires_grad_(False)
    built = make_optimizer(Options(optimizer=name, weight_decay=0.1), module, 0.1)
    assert sum(len(group["params"]) for group in built.param_groups) == 2


def test_step_schedule_drops_at_milestones() -> None:
    curve = Curve("step", 90, 0.0, milestones=(1 / 3, 2 / 3))
    drops = [step for step in range(1, 90) if curve(step) < curve(step - 1)]
    assert drops == [30, 60]
    assert curve(89) == pytest.approx(0.01)


def test_unused_flags_of_searches() -> None:
    flags = ["--patience=3", "--epochs=2", "--micro-batch=8", "--steps=9"]
    searching = [parse_options("image", [*flags, flag]) for flag in ("--find-lr", "--find-batch")]
    assert unused_flags(searching[0]) == ["--epochs", "--patience"]
    assert unused_flags(searching[1]) == ["--epochs", "--patience", "--steps", "--micro-batch"]
