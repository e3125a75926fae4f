"""The logs of a run's ranks: which there are, and reading what is added."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from pathlib import Path
from typing import IO

from paceline.explain.evidence_reader import log_files
from paceline.rundir.records import open_regular
from paceline.spec import rundir as names
from paceline.spec.terminal import clean, has_colours

MAX_TAIL_BYTES = 32 << 20  # bytes from the end in which last lines are looked for
MAX_LINE_BYTES = 1 << 14  # of each of the last lines; its end is shown
READ_BYTES = 1 << 20  # bytes read at once


def rank_logs(path: Path, rank: int | None = None, host: str | None = None) -> list[Path]:
    """Returns the log files of ranks, in rank order."""
    files = [(number, file) for file in log_files(path / names.LOGS)
             if (number := names.rank_of_log(file)) is not None]  # fmt: skip
    return [file for number, file in sorted(files)
            if rank in (None, number) and host in (None, file.parent.name)]  # fmt: skip


def last_lines(file: IO[bytes], count: int) -> bytes:
    """Returns the last ``count`` lines, of long ones the ends; the file is then at its end."""
    at = end = file.seek(0, os.SEEK_END)
    seen = b""
    while at > 0 and seen[:-1].count(b"\n") < count and len(seen) < MAX_TAIL_BYTES:
        step = min(READ_BYTES, at)
        at = file.seek(at - step)
        seen = file.read(step) + seen
    file.seek(end)
    lines = io.BytesIO(seen).readlines()  # a progress bar returns the carriage within its line
    return b"".join(map(_shortened, lines[max(0, len(lines) - count) :]))


def _shortened(line: bytes) -> bytes:
    if len(line) <= MAX_LINE_BYTES:
        return line
    return b"[long line] " + line[-MAX_LINE_BYTES:]


class LogReader:
    """Shows what is added to one log.

    Args:
        tail: Begin with so many of its last lines; ``None``: at its beginning.
        follow: Show now and then how far a progress bar is.
    """

    def __init__(self, path: Path, tail: int | None = None, *, follow: bool = False) -> None:
        # imports asyncio, which completion can do without
        from paceline.launch.terminal.screen import REDRAW_S, LineSplitter

        self._label = f"[{path.parent.name}/{path.stem}] "
        self._file = open_regular(path)
        self._lines = LineSplitter(REDRAW_S if follow else math.inf)
        self._tail = b"" if tail is None else last_lines(self._file, tail)

    def show(self, *, to_the_end: bool) -> None:
        """Prints what was added since; ``to_the_end`` also a last line that has no end yet."""
        while data := self._tail or self._file.read(READ_BYTES):
            self._tail = b""
            self._print(self._lines.feed(data, time.monotonic()))
        if to_the_end:
            self._print(self._lines.flush())
        sys.stdout.flush()

    def _print(self, lines: list[bytes]) -> None:
        for line in lines:
            text = clean(self._label + line.decode(errors="replace"), has_colours(sys.stdout))
            sys.stdout.write(text + "\n")
