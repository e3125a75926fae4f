"""Tests what is reported of the first batches of a model."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from paceline.agent.ranks import input_watch


class Model(nn.Linear):
    """In place of a DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, inputs: Any, *_: Any, **__: Any) -> Any:
        return super().forward(inputs if isinstance(inputs, torch.Tensor) else torch.zeros(2))

    @input_watch.hide_in_copies
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def test_reports_first_training_batches_once() -> None:
    model = Model()
    reports = list[dict[str, Any]]()
    input_watch.watch_inputs(model, 3, [0, 1], reports.append)
    model.eval()(torch.zeros(2))
    model.train()
    for step in range(9):
        model(torch.full((1, 2), float(step % 2)), mask={"rows": [torch.tensor(True)]}, scale=1.5)
    (report,) = reports
    assert (report["replica"], report["members"]) == (3, [0, 1])
    first, second, *others = report["batches"]
    assert first != second
    assert others == [first, second]
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("inputs", [object(), "no tensor"])
def test_inputs_that_cannot_be_compared_end_watch(
    inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    reports = list[dict[str, Any]]()
    input_watch.watch_inputs(model, 0, [0, 1], reports.append)
    model(inputs)
    assert not model._forward_pre_hooks
    monkeypatch.setattr(input_watch, "MAX_BYTES", 8)
    input_watch.watch_inputs(model, 0, [0, 1], reports.append)
    model(torch.zeros(3, 2))
    assert not model._forward_pre_hooks
    assert not reports


def test_copies_and_saved_modules_are_not_watched() -> None:
    model = Model()
    input_watch.watch_inputs(model, 0, [0, 1], list[Any]().append)
    model.register_forward_pre_hook(print)
    for copied in (copy.deepcopy(model), saved_and_loaded(model)):
        assert [*copied._forward_pre_hooks.values()] == [print]
        assert not copied._forward_pre_hooks_with_kwargs
    assert len(model._forward_pre_hooks) == 2


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
