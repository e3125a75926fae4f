"""The progress bar of a training: the launcher's, and that of a rank 0 without a launcher."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TextIO

from paceline.spec.formatting import format_epoch


class Bar:
    """A live progress bar on a terminal.

    Args:
        file: The terminal; ``None`` is standard output.
        stays: Leaves the last state on the screen.
    """

    def __init__(self, file: TextIO | None = None, stays: bool = False) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(file=file),
            transient=not stays,
            refresh_per_second=4,
        )
        self._told: Mapping[str, Any] = {}
        self._aside = ""
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def update(self, told: Mapping[str, Any]) -> None:
        """Draws where the training is: the fields of the event ``progress``."""
        self._told = told
        text = "  ".join(part for part in (describe(told, short=True), self._aside) if part)
        self._progress.update(self._task, total=told.get("steps"), completed=told.get("step", 0),
                              description=text)  # fmt: skip

    def aside(self, text: str) -> None:
        """Draws a few words more behind it."""
        if text != self._aside:
            self._aside = text
            self.update(self._told)

    def print(self, text: str) -> None:
        """A line above the bar, as it is."""
        self._progress.console.out(text, highlight=False)

    def stop(self) -> None:
        self._progress.stop()


def describe(told: Mapping[str, Any], short: bool = False) -> str:
    """``epoch 2/5  step 40/140  loss 0.3100  812 samples/s``, as far as it is known."""
    parts = []
    if "epoch" in told:
        parts.append(format_epoch(told["epoch"], told.get("epochs")))
    if not short and "step" in told:
        of = f"/{told['steps']}" if told.get("steps") else ""
        parts.append(f"step {told['step']}{of}")
    loss, rate = told.get("loss"), told.get("samples_per_s")
    if isinstance(loss, (int, float)) and math.isfinite(loss):
        parts.append(f"loss {loss:.4f}")
    if isinstance(rate, (int, float)):
        parts.append(f"{rate:,.0f} samples/s")
    return "  ".join(parts)
