"""The outcome of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launch.terminal.screen import NOISE
from paceline.rundir.directory import short
from paceline.rundir.records import open_regular
from paceline.spec import rundir as names
from paceline.spec.events import Event, ShippedCopy, log_offsets
from paceline.spec.failure import Result

LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 16384


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of a finished run.

    Attributes:
        events: The events of events.jsonl.
        metrics: The last reported value of every metric.
        seconds: From the call to the end.
        resumable: Whether the training was asked to stop and has a checkpoint.
        ranks: The number of planned ranks.
        shipped_copies: Copies of this machine's folders on the hosts.
        is_log_displayed: Whether the screen already shows the last lines of the first failure.
        command: The typed command, the program first; empty for that of this process.
        is_refused: Nothing was trained, and the records are those of the earlier run.
    """

    path: Path
    result: Result
    events: tuple[Event, ...]
    metrics: dict[str, Any]
    seconds: float
    resumable: bool = False
    ranks: int = 0
    shipped_copies: Sequence[ShippedCopy] = ()
    is_log_displayed: bool = False
    command: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def display_path(self) -> Path:
        """The run directory as the user types it."""
        return Path(short(self.path))

    def log_tail(self, host: str, rank: int) -> str:
        """The last lines that a rank wrote since it started last; empty if it wrote none."""
        log = self.path / names.log_file(host, rank)
        return log_tail(log, log_offsets(self.events).get((host, rank), 0))


def is_resumable(result: Result, events: Iterable[Event]) -> bool:
    """Whether a training was asked to stop and has a checkpoint."""
    events = [*events]
    was_recorded = result.failure is None or result.failure.kind != "record"
    was_stopped = result.interrupted is not None or not was_recorded
    return any(event.resumable for event in events) or (was_stopped and bool(saved_steps(events)))


def saved_steps(events: Iterable[Event]) -> list[int]:
    """Steps of the checkpoints that a training has made or resumed from, in their order."""
    return [event["step"] for event in events if event.kind in ("checkpoint", "resumed")]


def log_tail(log: Path, begins: int) -> str:
    """Returns the last lines of a log after its first ``begins`` bytes; empty if it has none."""
    try:
        with open_regular(log) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(begins, size - LOG_TAIL_BYTES))
            data = file.read(LOG_TAIL_BYTES)
    except OSError:
        return ""
    lines = [line for line in data.decode(errors="replace").splitlines() if not NOISE.search(line)]
    return "\n".join(lines[-LOG_TAIL_LINES:])
