"""``metrics.jsonl`` as it is read by the launcher and by a rank: one record a line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 1 << 20
"""Of a line; a longer one is no record."""


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
