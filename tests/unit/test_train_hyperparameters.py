"""Tests hyperparameters that were changed between a checkpoint and resuming."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from paceline.spec.errors import SettingError
from paceline.train.checkpoints.format import pack, unpack
from paceline.train.update import Updater


def halve(step: int) -> float:
    return 0.5**step


def make_updater(
    kind: Any = SGD,
    schedule: Any = LambdaLR,
    arguments: tuple[Any, ...] = (halve,),
    **options: Any,
) -> Updater:
    module = nn.Linear(2, 1)
    optimizer: Optimizer = kind(module.parameters(), **options)
    scheduler: LRScheduler | None = schedule and schedule(optimizer, *arguments)
    return Updater(module, optimizer, scheduler, None, None)


def train_and_save(updater: Updater, steps: int = 2) -> dict[str, Any]:
    for _ in range(steps):
        updater.backward(updater.module(torch.ones(1, 2)).sum())
        updater.update()
    return updater.state()


def resume(updater: Updater, state: dict[str, Any], *extras: object) -> None:
    updater.load_state(state)
    updater.apply_constructed(extras)


def param_group(updater: Updater) -> dict[str, Any]:
    return updater.optimizer.param_groups[0]


def test_unchanged_hyperparameters_keep_loaded_values() -> None:
    saved_updater = make_updater(lr=0.1, weight_decay=0.25)
    param_group(saved_updater)["weight_decay"] = 0.5  # changed by the script
    updater = make_updater(lr=0.1, weight_decay=0.25)
    resume(updater, train_and_save(saved_updater))
    assert updater.changed_settings == []
    assert (updater.lr, param_group(updater)["weight_decay"]) == (saved_updater.lr, 0.5)
    assert updater.schedule is not None
    assert updater.schedule.state_dict() == saved_updater.schedule.state_dict()  # type: ignore[union-attr]


def test_changed_hyperparameters_override_and_keep_state() -> None:
    saved_updater = make_updater(lr=0.1, momentum=0.9)
    state = train_and_save(saved_updater)
    updater = make_updater(lr=0.4, momentum=0.5, weight_decay=0.5)
    resume(updater, state)
    assert updater.changed_settings == [
        "learning rate 0.1 of the checkpoint → 0.4",
        "momentum 0.9 of the checkpoint → 0.5",
        "weight decay 0 of the checkpoint → 0.5",
    ]
    assert (updater.lr, param_group(updater)["initial_lr"]) == (0.1, 0.4)  # after two steps
    assert updater.schedule is not None
    assert updater.schedule.get_last_lr() == [0.1]
    assert (param_group(updater)["momentum"], param_group(updater)["weight_decay"]) == (0.5, 0.5)
    for loaded_state, original_state in zip(
        updater.optimizer.state.values(), saved_updater.optimizer.state.values(), strict=True
    ):
        assert torch.equal(loaded_state["momentum_buffer"], original_state["momentum_buffer"])
    next_state = train_and_save(updater, steps=1)
    assert updater.lr == 0.05
    resumed = make_updater(lr=0.4, momentum=0.5, weight_decay=0.5)
    resume(resumed, next_state)
    assert resumed.changed_settings == []


def test_changed_learning_rate_uses_constructed_schedule() -> None:
    updater = make_updater(lr=0.4, arguments=(lambda step: 1.0,))
    resume(updater, train_and_save(make_updater(lr=0.1)))
    assert updater.lr == 0.4


@pytest.mark.parametrize(
    ("schedule", "arguments"),
    [
        (None, ()),
        (CosineAnnealingLR, (10,)),
        (MultiStepLR, ([1, 4],)),
        (OneCycleLR, (0.5, 10)),
    ],
)
def test_changed_learning_rate_with_any_schedule(schedule: Any, arguments: tuple[Any, ...]) -> None:
    if schedule is OneCycleLR:
        saved_updater, reference = (make_updater(Adam, schedule, (peak, 10)) for peak in (0.5, 1.0))
        updater = make_updater(Adam, schedule, (1.0, 10))
    else:
        saved_updater, reference, updater = (
            make_updater(Adam, schedule, arguments, lr=lr) for lr in (0.1, 0.2, 0.2)
        )
    tensors: dict[str, torch.Tensor] = {}
    resume(updater, unpack(pack(train_and_save(saved_updater), tensors), tensors))
    train_and_save(reference)
    assert updater.lr == pytest.approx(reference.lr)
    train_and_save(updater, steps=3), train_and_save(reference, steps=3)
    assert updater.lr == pytest.approx(reference.lr)


def test_changed_learning_rate_with_sequential_schedule() -> None:
    def make(lr: float) -> Updater:
        updater = make_updater(schedule=None, lr=lr)
        optimizer = updater.optimizer
        parts = [LinearLR(optimizer, 0.5, total_iters=3), CosineAnnealingLR(optimizer, 10)]
        schedule = SequentialLR(optimizer, parts, [3])
        return Updater(updater.module, optimizer, schedule, None, None)

    updater, reference = make(0.2), make(0.2)
    resume(updater, train_and_save(make(0.1)))
    train_and_save(updater, steps=3), train_and_save(reference, steps=5)
    assert updater.lr == pytest.approx(reference.lr)


def test_changed_learning_rate_with_script_schedule() -> None:
    saved_updater, updater = (
        make_updater(schedule=None, lr=0.1),
        make_updater(schedule=None, lr=0.4),
    )
    saved_schedule = LambdaLR(saved_updater.optimizer, halve)
    schedule = LambdaLR(updater.optimizer, halve)
    train_and_save(saved_updater)
    saved_schedule.step()
    state = saved_updater.state()
    schedule.load_state_dict(saved_schedule.state_dict())
    resume(updater, state, schedule)
    assert updater.lr == 0.2
    train_and_save(updater, steps=1)
    schedule.step()
    assert updater.lr == 0.1


def test_resume_without_recorded_hyperparameters() -> None:
    state = train_and_save(make_updater(lr=0.1, weight_decay=0.25))
    del state["hyperparameters"]
    updater = make_updater(lr=0.4)
    resume(updater, state)
    assert updater.changed_settings == ["learning rate 0.1 of the checkpoint → 0.4"]
    assert (updater.lr, param_group(updater)["weight_decay"]) == (0.1, 0.25)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_rejects_different_optimizer(is_recorded: bool) -> None:
    state = train_and_save(make_updater(Adam, lr=0.1))
    if not is_recorded:
        del state["hyperparameters"]
    with pytest.raises(SettingError, match="another optimizer") as caught:
        make_updater(SGD, lr=0.1).load_state(state)
    message = str(caught.value.found)
    assert "SGD" in message
    assert "Adam in the checkpoint" in message or "betas" in message


def test_rejects_adam_state_for_adamw() -> None:
    with pytest.raises(SettingError) as caught:
        make_updater(AdamW, lr=0.5).load_state(train_and_save(make_updater(Adam, lr=0.01)))
    assert caught.value.found == "Adam in the checkpoint, AdamW now"


def test_newcomer_adopts_hyperparameters_of_group() -> None:
    state = train_and_save(make_updater(lr=0.1))
    json.dumps(state["hyperparameters"])
    updater = make_updater(lr=0.4)
    updater.load_state(state, replicated_only=True)
    assert (updater.lr, updater.changed_settings) == (0.025, [])
    assert updater.state()["hyperparameters"] == state["hyperparameters"]
