"""Weights & Biases, also offline (``WANDB_MODE=offline``); the key comes from its own settings."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import wandb  # type: ignore[import-not-found, unused-ignore]

from paceline.train.trackers import About


class Wandb:
    """One run, continued under its id."""

    def __init__(self, about: About) -> None:
        self.run_id = about.run_id or secrets.token_hex(4)
        self._run: Any = wandb.init(
            project=about.project,
            id=self.run_id,
            name=about.name,
            group=about.group or None,
            dir=str(about.folder),
            config=dict(about.config),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open(about: About) -> Wandb:
    """Begins or resumes a run."""
    return Wandb(about)
