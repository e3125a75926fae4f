"""``metrics.jsonl`` as the launcher or a rank keeps it: one record a line, every step once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 1 << 20
"""Of a line; a longer one is no record."""


_MOST_TOLD = 4096  # steps of splits of which it is known who told them


class Steps:
    """Which steps of each split are recorded: a training that resumes repeats some. Pure, but for
    the file that :meth:`resume` reads.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # the last step of each split
        self._known: dict[str, int] = {}  # the same, before the present attempt
        self._told: dict[tuple[str, int], object] = {}  # by whom, of the latest steps

    @property
    def none(self) -> bool:
        """Whether nothing was recorded yet."""
        return not self._seen

    def next_attempt(self) -> None:
        """Whatever comes again from now on is known."""
        self._known = dict(self._seen)
        self._told.clear()

    def resume(self, path: Path) -> None:
        """What an earlier run has left in a file is known, too."""
        self._known = _later(self._known, last_steps(path))

    def new(self, record: Mapping[str, Any], speaker: object = None) -> bool:
        """Whether a record is to be kept.

        Args:
            record: Of the same step and split there may be several, by one speaker.
            speaker: Who tells it. What the next one has said again comes late from the former, too,
                where its host could not be heard for a while.
        """
        split, step = str(record.get("split", "")), record.get("step")
        if not isinstance(step, int):
            return True
        if step <= self._known.get(split, -1):
            return False
        if self._told.setdefault((split, step), speaker) != speaker:
            return False
        if len(self._told) > _MOST_TOLD:
            del self._told[next(iter(self._told))]
        self._seen = _later(self._seen, {split: step})
        return True


def _later(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {split: max(one.get(split, -1), other.get(split, -1)) for split in {*one, *other}}


def last_steps(path: Path) -> dict[str, int]:
    """The last recorded step of each split.

    What is no record does not count, whatever it is: the file may come from anywhere.
    """
    last: dict[str, int] = {}
    with contextlib.suppress(OSError), path.open("rb") as file:
        while line := file.readline(MOST_BYTES):
            if not line.endswith(b"\n") and len(line) == MOST_BYTES:
                _skip_line(file)
                continue
            # a number may be too long to be read, or brackets too deep
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    split, step = record.get("split", ""), record.get("step")
                    if isinstance(split, str) and type(step) is int and 0 <= step < 1 << 63:
                        last[split] = max(last.get(split, -1), step)
    return last


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(MOST_BYTES)) and not rest.endswith(b"\n"):
        pass
