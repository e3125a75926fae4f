"""Hyperparameters with which an optimizer was constructed, and their changes at a resume.

A schedule or a script changes learning rates during a training, so a checkpoint also records the
values of the construction: only these show what the user has changed since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR

from paceline.spec.errors import SettingError

Values = dict[str, Any]
"""Hyperparameters of one parameter group, as JSON values."""

_BASE_LR = "initial_lr"  # where a schedule records the learning rate that it starts from
_IGNORED = {
    *("params", "param_names", _BASE_LR),
    *("capturable", "differentiable", "foreach", "fused"),  # how to compute, not what
}
_OF_SCHEDULES = {_BASE_LR, "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"}
_RECIPE_FLAGS = {
    "Adam": "--optimizer adam",
    "AdamW": "--optimizer adamw",
    "MuonWithAuxiliary": "--muon",
    "SGD": "--optimizer sgd",
}
_LABELS = {"lr": "learning rate"}


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Returns class and hyperparameters of an optimizer before its first step, as JSON values."""
    groups = [
        {
            name: _to_json(group.get(_BASE_LR, value) if name == "lr" else value)
            for name, value in group.items()
            if name not in _IGNORED
        }
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def check_class(
    optimizer: Optimizer, recorded: Mapping[str, Any] | None, saved_groups: Sequence[Values]
) -> None:
    """Checks that a checkpoint is of the same class of optimizer.

    Args:
        recorded: What :func:`describe_optimizer` returned when the checkpoint's optimizer was
            constructed; ``None``: an older version made it.
        saved_groups: The checkpoint's parameter groups; the names of hyperparameters must fit.

    Raises:
        SettingError: It is another class.
    """
    name, flag = type(optimizer).__name__, "--optimizer"
    former = name if recorded is None else str(recorded["class"])
    if former != name:
        found, flag = f"{former} in the checkpoint, {name} now", _RECIPE_FLAGS.get(former, flag)
        flag += " without --muon" if _RECIPE_FLAGS.get(name) == "--muon" else ""
    else:
        saved = {key for group in saved_groups for key in group} - _IGNORED - _OF_SCHEDULES
        unknown = sorted(saved - {key for group in optimizer.param_groups for key in group})
        if not unknown or optimizer.defaults.keys() - _IGNORED <= saved:
            return  # PyTorch's newer versions and scripts add some
        found = f"hyperparameters of the checkpoint that {name} does not have: {', '.join(unknown)}"
    raise SettingError(
        "the checkpoint is of another optimizer, whose state does not fit",
        found=found,
        remedy=f"the former optimizer ({flag} of a recipe); --resume never or a --run-dir of its"
        " own starts a new training with the new one",
    )


def apply_changes(
    optimizer: Optimizer,
    schedules: Sequence[LRScheduler],
    constructed: Sequence[Values],
    recorded: Sequence[Values] | None,
) -> list[str]:
    """Sets hyperparameters that were constructed with other values than those of a checkpoint.

    Call it after optimizer and schedules have loaded their states. Equal hyperparameters stay as
    loaded, also if a schedule or the script had changed them.

    Args:
        constructed: Groups of :func:`describe_optimizer` of this optimizer.
        recorded: Those of the checkpoint's optimizer; ``None``: an older version made it. Only the
            learning rate from which a schedule starts is then known.

    Returns:
        A description of each change.
    """
    groups = optimizer.param_groups
    if recorded is None:
        recorded = [
            {"lr": _to_json(group[_BASE_LR])} if _BASE_LR in group else {} for group in groups
        ]
    changes: dict[str, None] = {}
    new_rates: dict[int, tuple[float, float]] = {}  # former and new one by number of the group
    triples = zip(groups, recorded, constructed, strict=False)  # a script may add groups later
    for number, (group, former, new) in enumerate(triples):
        for name in former.keys() & new.keys():
            if former[name] == new[name]:
                continue
            label = _LABELS.get(name, name.replace("_", " "))
            changes[f"{label} {_show(former[name])} of the checkpoint → {_show(new[name])}"] = None
            if name == "lr":
                new_rates[number] = former[name], new[name]
            else:
                _assign(group, name, new[name])
    if new_rates:
        _set_base_rates(optimizer, schedules, new_rates)
    return sorted(changes)


def _set_base_rates(
    optimizer: Optimizer,
    schedules: Sequence[LRScheduler],
    rates: Mapping[int, tuple[float, float]],
) -> None:
    """Sets the learning rates from which schedules start, and the present ones."""
    parts = [part for schedule in schedules for part in _parts(schedule)]
    for number, (_, new) in rates.items():
        if _BASE_LR in optimizer.param_groups[number]:
            _assign(optimizer.param_groups[number], _BASE_LR, new)
        for part in parts:
            if number < len(part.base_lrs):
                _assign(part.base_lrs, number, new)
    present = _rates_of(schedules[0]) if len(schedules) == 1 else None
    for number, (former, new) in rates.items():
        group = optimizer.param_groups[number]
        scaled = float(group["lr"]) * (new / former) if former else new
        _assign(group, "lr", scaled if present is None else float(present[number]))
    for part in parts:
        part._last_lr = [group["lr"] for group in optimizer.param_groups]


def set_rates(schedule: LambdaLR) -> None:
    """Sets the learning rates of the present step, after a schedule's functions have changed."""
    rates = _rates_of(schedule)
    for group, rate in zip(schedule.optimizer.param_groups, rates or (), strict=True):
        _assign(group, "lr", float(rate))
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]


def _parts(schedule: LRScheduler) -> Iterator[LRScheduler]:
    """Yields a schedule and those that it consists of."""
    if hasattr(schedule, "base_lrs"):
        yield schedule
    for part in getattr(schedule, "_schedulers", ()):
        yield from _parts(part)


def _rates_of(schedule: LRScheduler) -> Sequence[float | Tensor] | None:
    """Returns a schedule's learning rates at the present step; ``None`` if it has no formula."""
    if isinstance(schedule, LambdaLR):
        factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        return [base * factor for base, factor in zip(schedule.base_lrs, factors, strict=True)]
    if isinstance(schedule, MultiStepLR):
        schedule.milestones = Counter(schedule.milestones)  # loaded as a dict; the formula needs it
    closed_form = getattr(schedule, "_get_closed_form_lr", None)
    return None if closed_form is None else list(closed_form())


def _assign(values: Any, key: Any, value: Any) -> None:
    """Sets a hyperparameter, of the type that it had."""
    if isinstance(values[key], Tensor):  # a captured graph reads it
        values[key].fill_(value)
    else:
        values[key] = tuple(value) if isinstance(values[key], tuple) else value


def _to_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_to_json(part) for part in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_show, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)
