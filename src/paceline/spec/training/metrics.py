"""Filters the records of ``metrics.jsonl``, so that it holds each step once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 1 << 20  # a longer line is no record
_MAX_SPLITS = 1000
_MAX_SENDERS = 4096  # steps of splits whose sender is remembered


class StepFilter:
    """Accepts each step of each split once: a training that resumes repeats some."""

    def __init__(self) -> None:
        self._recorded: dict[str, int] = {}  # the last step of each split
        self._previous: dict[str, int] = {}  # the same, before the present attempt
        self._senders: dict[tuple[str, int], object] = {}  # of the latest steps

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded yet."""
        return not self._recorded

    def next_attempt(self) -> None:
        """Rejects all recorded steps from now on."""
        self._previous = dict(self._recorded)
        self._senders.clear()

    def resume(self, path: Path) -> None:
        """Rejects the steps that an earlier run has recorded in a file."""
        self._previous = _maxima(self._previous, recorded_steps(path))

    def accept(self, record: Mapping[str, Any], sender: object = None) -> bool:
        """Whether a record is to be kept.

        Args:
            record: One sender may send several for the same step and split.
            sender: Who sent it. After a handover, a former sender that was disconnected may deliver
                late what its successor has sent again.
        """
        split, step = str(record.get("split", "")), record.get("step")
        if not isinstance(step, int):
            return True
        if step <= self._previous.get(split, -1):
            return False
        if self._senders.setdefault((split, step), sender) != sender:
            return False
        if len(self._senders) > _MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        if split in self._recorded or len(self._recorded) < _MAX_SPLITS:
            self._recorded = _maxima(self._recorded, {split: step})
        return True


def _maxima(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {split: max(a.get(split, -1), b.get(split, -1)) for split in {*a, *b}}


def recorded_steps(path: Path) -> dict[str, int]:
    """The last recorded step of each split; ignores anything that is no record."""
    steps: dict[str, int] = {}
    if not path.is_file():  # opening a pipe would block
        return steps
    with contextlib.suppress(OSError), path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
                while (tail := file.readline(MAX_LINE_BYTES)) and not tail.endswith(b"\n"):
                    pass
                continue
            # a number may be too long, or brackets nested too deeply
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    split, step = record.get("split", ""), record.get("step")
                    if isinstance(split, str) and type(step) is int and 0 <= step < 1 << 63:
                        steps[split] = max(steps.get(split, -1), step)
    return steps
