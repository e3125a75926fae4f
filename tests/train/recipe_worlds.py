"""Shares helpers for trainings of recipes in forked processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.train import Session


def killed_after(steps: int, body: Callable[[], None]) -> None:
    """Runs a body in a process that is killed after a number of steps."""
    original, count = Session.step, 0

    def step(self: Session, *losses: Any, **values: Any) -> bool:
        nonlocal count
        has_stepped = original(self, *losses, **values)
        count += has_stepped
        if count == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return has_stepped

    Session.step = step  # type: ignore[method-assign]
    body()


def result(folder: Path) -> dict[str, Any]:
    """Returns a run's losses by step, and all parameters."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    state = load_file(folder / "model/model.safetensors")
    losses: dict[str, dict[int, float]] = {"train": {}, "val": {}}
    for line in lines:
        if line["split"] in losses:
            losses[line["split"]][line["step"]] = line["loss"]
    values = torch.cat([state[key].flatten() for key in sorted(state)])
    return {**losses, "parameters": values.tolist()}
