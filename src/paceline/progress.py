"""The progress bar of a training, for the launcher and for rank 0 without a launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from paceline.spec.formatting import format_epoch


class Bar:
    """A live progress bar on a terminal.

    Args:
        file: The terminal; ``None`` is standard output.
        stays: Leave the last state on the screen.
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
        self._fields: Mapping[str, Any] = {}
        self._aside = ""
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def update(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        text = "  ".join(part for part in (describe(fields, compact=True), self._aside) if part)
        step, steps = fields.get("step", 0), fields.get("steps")
        self._progress.update(self._task, total=steps, completed=step, description=text)

    def aside(self, text: str) -> None:
        if text != self._aside:
            self._aside = text
            self.update(self._fields)

    def print(self, text: str) -> None:
        """Prints a line above the bar without markup."""
        self._progress.console.out(text, highlight=False)

    def stop(self) -> None:
        self._progress.stop()


def describe(fields: Mapping[str, Any], compact: bool = False) -> str:
    """Returns ``epoch 2/5  step 40/140  loss 0.3100  812 samples/s``, without unknown parts."""
    parts = []
    if "epoch" in fields:
        parts.append(format_epoch(fields["epoch"], fields.get("epochs")))
    if not compact and "step" in fields:
        of = f"/{fields['steps']}" if fields.get("steps") else ""
        parts.append(f"step {fields['step']}{of}")
    loss, rate = fields.get("loss"), fields.get("samples_per_s")
    if isinstance(loss, (int, float)) and abs(loss) < 1e300:
        parts.append(f"loss {loss:.4f}")
    if isinstance(rate, (int, float)) and abs(rate) < 1e300:
        parts.append(f"{rate:,.0f} samples/s")
    return "  ".join(parts)
