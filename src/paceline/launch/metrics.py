"""metrics.jsonl: every step once, however often the job was started again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.rundir.directory import RunDirectory
from paceline.spec.records import last_steps
from paceline.spec.rundir import METRICS


class MetricsLog:
    """Appends what rank 0 measured; steps that an attempt repeats are left out.

    Attributes:
        last: The last value of every metric that was reported.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.last: dict[str, Any] = {}
        self._directory = directory
        self._seen: dict[str, int] = {}  # by split, in this job
        self._known: dict[str, int] = {}  # the same before the present attempt

    def next_attempt(self) -> None:
        """Whatever comes again from now on is known."""
        self._known = dict(self._seen)

    def begin(self, *, resumed: bool) -> None:
        """The training says whether it goes on; a new one leaves the earlier run's file aside."""
        if resumed:
            self._known = _merged(self._known, last_steps(self._directory.path / METRICS))
        elif not self._seen:
            self._directory.set_aside(METRICS)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record, unless its split and step are known."""
        self.last |= record
        split, step = str(record.get("split", "")), record.get("step")
        if not isinstance(step, int):
            self._directory.append_line(METRICS, dict(record))
        elif step > self._known.get(split, -1):
            self._directory.append_line(METRICS, dict(record))
            self._seen = _merged(self._seen, {split: step})


def _merged(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {split: max(one.get(split, -1), other.get(split, -1)) for split in {*one, *other}}
