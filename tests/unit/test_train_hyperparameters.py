"""Hyperparameters that were changed between a checkpoint and its resume."""

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


def halved(step: int) -> float:
    return 0.5**step


def updater_of(
    kind: Any = SGD,
    schedule: Any = LambdaLR,
    arguments: tuple[Any, ...] = (halved,),
    **options: Any,
) -> Updater:
    module = nn.Linear(2, 1)
    optimizer: Optimizer = kind(module.parameters(), **options)
    made: LRScheduler | None = schedule and schedule(optimizer, *arguments)
    return Updater(module, optimizer, made, None, None)


def saved(updater: Updater, steps: int = 2) -> dict[str, Any]:
    for _ in range(steps):
        updater.backward(updater.module(torch.ones(1, 2)).sum())
        updater.update()
    return updater.state()


def resume(updater: Updater, state: dict[str, Any], *extras: object) -> None:
    updater.load_state(state)
    updater.apply_constructed(extras)


def group(updater: Updater) -> dict[str, Any]:
    return updater.optimizer.param_groups[0]


def test_equal_hyperparameters_stay_as_loaded() -> None:
    former = updater_of(lr=0.1, weight_decay=0.25)
    group(former)["weight_decay"] = 0.5  # by the script
    updater = updater_of(lr=0.1, weight_decay=0.25)
    resume(updater, saved(former))
    assert updater.changed_settings == []
    assert (updater.lr, group(updater)["weight_decay"]) == (former.lr, 0.5)
    assert updater.schedule is not None
    assert updater.schedule.state_dict() == former.schedule.state_dict()  # type: ignore[union-attr]


def test_changed_hyperparameters_count_and_state_stays() -> None:
    former = updater_of(lr=0.1, momentum=0.9)
    state = saved(former)
    updater = updater_of(lr=0.4, momentum=0.5, weight_decay=0.5)
    resume(updater, state)
    assert updater.changed_settings == [
        "learning rate 0.1 of the checkpoint → 0.4",
        "momentum 0.9 of the checkpoint → 0.5",
        "weight decay 0 of the checkpoint → 0.5",
    ]
    assert (updater.lr, group(updater)["initial_lr"]) == (0.1, 0.4)  # after two steps
    assert updater.schedule is not None
    assert updater.schedule.get_last_lr() == [0.1]
    assert (group(updater)["momentum"], group(updater)["weight_decay"]) == (0.5, 0.5)
    for now, then in zip(
        updater.optimizer.state.values(), former.optimizer.state.values(), strict=True
    ):
        assert torch.equal(now["momentum_buffer"], then["momentum_buffer"])
    later = saved(updater, steps=1)
    assert updater.lr == 0.05
    again = updater_of(lr=0.4, momentum=0.5, weight_decay=0.5)
    resume(again, later)
    assert again.changed_settings == []


def test_another_schedule_comes_with_the_learning_rate() -> None:
    updater = updater_of(lr=0.4, arguments=(lambda step: 1.0,))
    resume(updater, saved(updater_of(lr=0.1)))
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
def test_learning_rate_of_any_schedule(schedule: Any, arguments: tuple[Any, ...]) -> None:
    if schedule is OneCycleLR:
        former, whole = (updater_of(Adam, schedule, (peak, 10)) for peak in (0.5, 1.0))
        updater = updater_of(Adam, schedule, (1.0, 10))
    else:
        former, whole, updater = (
            updater_of(Adam, schedule, arguments, lr=lr) for lr in (0.1, 0.2, 0.2)
        )
    tensors: dict[str, torch.Tensor] = {}
    resume(updater, unpack(pack(saved(former), tensors), tensors))
    saved(whole)
    assert updater.lr == pytest.approx(whole.lr)
    saved(updater, steps=3), saved(whole, steps=3)
    assert updater.lr == pytest.approx(whole.lr)


def test_learning_rate_of_a_sequence_of_schedules() -> None:
    def make(lr: float) -> Updater:
        updater = updater_of(schedule=None, lr=lr)
        optimizer = updater.optimizer
        parts = [LinearLR(optimizer, 0.5, total_iters=3), CosineAnnealingLR(optimizer, 10)]
        schedule = SequentialLR(optimizer, parts, [3])
        return Updater(updater.module, optimizer, schedule, None, None)

    updater, whole = make(0.2), make(0.2)
    resume(updater, saved(make(0.1)))
    saved(updater, steps=3), saved(whole, steps=5)
    assert updater.lr == pytest.approx(whole.lr)


def test_schedules_that_the_script_steps() -> None:
    former, updater = updater_of(schedule=None, lr=0.1), updater_of(schedule=None, lr=0.4)
    saved_schedule = LambdaLR(former.optimizer, halved)
    schedule = LambdaLR(updater.optimizer, halved)
    saved(former)
    saved_schedule.step()
    state = former.state()
    schedule.load_state_dict(saved_schedule.state_dict())
    resume(updater, state, schedule)
    assert updater.lr == 0.2
    saved(updater, steps=1)
    schedule.step()
    assert updater.lr == 0.1


def test_checkpoints_of_older_versions() -> None:
    state = saved(updater_of(lr=0.1, weight_decay=0.25))
    del state["hyperparameters"]
    updater = updater_of(lr=0.4)
    resume(updater, state)
    assert updater.changed_settings == ["learning rate 0.1 of the checkpoint → 0.4"]
    assert (updater.lr, group(updater)["weight_decay"]) == (0.1, 0.25)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_another_optimizer_is_refused(is_recorded: bool) -> None:
    state = saved(updater_of(Adam, lr=0.1))
    if not is_recorded:
        del state["hyperparameters"]
    with pytest.raises(SettingError, match="another optimizer") as refused:
        updater_of(SGD, lr=0.1).load_state(state)
    found = str(refused.value.found)
    assert "SGD" in found
    assert "Adam in the checkpoint" in found or "betas" in found


def test_adamw_is_not_adam() -> None:
    with pytest.raises(SettingError) as refused:
        updater_of(AdamW, lr=0.5).load_state(saved(updater_of(Adam, lr=0.01)))
    assert refused.value.found == "Adam in the checkpoint, AdamW now"


def test_a_newcomer_takes_those_of_the_others() -> None:
    state = saved(updater_of(lr=0.1))
    json.dumps(state["hyperparameters"])
    updater = updater_of(lr=0.4)
    updater.load_state(state, replicated_only=True)
    assert (updater.lr, updater.changed_settings) == (0.025, [])
    assert updater.state()["hyperparameters"] == state["hyperparameters"]
