"""Experiment trackers as plug-ins: imported on use, and never in the way of the training.

A tracker is a module here with ``open(about) -> Tracker`` and one line in :data:`TRACKERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

TRACKERS: dict[str, str] = {
    "tensorboard": "paceline.train.trackers.tensorboard",
    "wandb": "paceline.train.trackers.wandb",
    "mlflow": "paceline.train.trackers.mlflow",
    "trackio": "paceline.train.trackers.trackio",
}


@dataclass(frozen=True)
class About:
    """The run, as trackers want to know it.

    Attributes:
        folder: The run directory.
        project: Name under which runs are collected.
        name: Name of this run.
        run_id: Identity in the tracker; given again when the run goes on after a resume. Empty
            when the tracker is to choose.
        group: Common name of the runs of all nodes; empty where one run stands for all.
        config: Settings of the run.
        resumed_at: Step after which records that an earlier process may have sent are void; -1
            when every earlier record stands.
    """

    folder: Path
    project: str
    name: str
    run_id: str = ""
    group: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed_at: int = -1


class Tracker(Protocol):
    """Where measured values go."""

    @property
    def run_id(self) -> str:
        """Identity of the run, to be given again after a resume; may be empty."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of a global step, by names such as ``train/loss``."""
        ...

    def close(self) -> None: ...


def load(name: str, about: About) -> Tracker:
    """Imports a tracker and begins or resumes a run in it.

    Raises:
        Exception: Whatever the tracker's library raises; also when it is not installed.
    """
    module = importlib.import_module(TRACKERS[name])
    tracker: Tracker = module.open(about)
    return tracker
