"""``paceline logs``: what the ranks of a run have written, and go on writing."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from pathlib import Path
from typing import IO

import click

from paceline.cli.flags import of_a_left_run
from paceline.cli.verb import Verb, say
from paceline.explain.evidence_reader import log_files
from paceline.rundir.records import open_regular
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError
from paceline.spec.terminal import clean, for_reader

LOOK_EVERY_S = 0.3
MOST_BACK = 32 << 20  # bytes from the end in which last lines are looked for
PIECE = 1 << 20  # bytes read at once


@click.command("logs", cls=Verb)
@of_a_left_run
@click.option("--rank", type=click.IntRange(0), help="Only this rank.")
@click.option("--host", metavar="NAME", help="Only the ranks of this host.")
@click.option("-n", "--tail", type=click.IntRange(0), help="Begin with the last N lines of each.")
@click.option("-f", "--follow", is_flag=True, help="Follow until the run is over.")
@click.pass_context
def command(ctx: click.Context, /, rank: int | None, host: str | None, tail: int | None,
            follow: bool, **_: object) -> None:  # fmt: skip
    """Print the logs of RUN, each line labelled HOST/RANK.

    Without RUN: the one below runs/ that is running, else the newest there.

    With -H also a run that was started from another machine.
    """
    from paceline.cli.elsewhere import as_far_as_possible, kept_up_to_date, meant
    from paceline.cli.runs import describe, look_at

    path = meant(ctx, ended=True)
    readers: dict[Path, Reader] = {}

    def show(*, to_the_end: bool) -> None:
        for file in logs_of(path, rank, host):
            if file not in readers:
                readers[file] = Reader(file, tail, follow=follow)
            readers[file].show(to_the_end=to_the_end)

    if follow:
        with kept_up_to_date(path) as is_over:
            over = False
            while not over:
                over = is_over()
                show(to_the_end=over)
                time.sleep(0 if over else LOOK_EVERY_S)
    else:
        as_far_as_possible(path)
        show(to_the_end=True)
    if (state := look_at(path)).lost:  # nobody else says why there is no more
        say(for_reader(describe(state), sys.stderr), err=True)
    if not readers and (rank is not None or host is not None):
        which = [f"rank {rank}"] if rank is not None else []
        raise SettingError(
            f"{path} has no log of {' on '.join([*which, *([host] if host else [])])}",
            found=", ".join(f"{file.parent.name}/{file.stem}" for file in logs_of(path)[:20]),
        )


def logs_of(path: Path, rank: int | None = None, host: str | None = None) -> list[Path]:
    """Log files of ranks, in the order of the ranks."""
    found = [(number, file) for file in log_files(path / names.LOGS)
             if (number := names.rank_of(file)) is not None]  # fmt: skip
    return [
        file
        for number, file in sorted(found)
        if rank in (None, number) and host in (None, file.parent.name)
    ]


def seek_lines(file: IO[bytes], count: int) -> None:
    """Goes to where the last ``count`` lines begin, reading from the end only."""
    end = file.seek(0, os.SEEK_END)
    at, seen = end, b""
    while at > 0 and seen[:-1].count(b"\n") < count and len(seen) < MOST_BACK:
        step = min(PIECE, at)
        at = file.seek(at - step)
        seen = file.read(step) + seen
    lines = io.BytesIO(seen).readlines()  # a progress bar returns the carriage within its line
    file.seek(end - sum(map(len, lines[len(lines) - count :])) if count < len(lines) else at)


class Reader:
    """Shows what is added to one log.

    Args:
        path: Of the log.
        tail: Begins with so many of its last lines; ``None``: at its beginning.
        follow: Shows now and then how far a progress bar is.
    """

    def __init__(self, path: Path, tail: int | None = None, *, follow: bool = False) -> None:
        from paceline.launch.screen import (
            REDRAW_S,
            Lines,
        )  # asyncio, which completion can do without

        self._label = f"[{path.parent.name}/{path.stem}] "
        self._file = open_regular(path)
        self._lines = Lines(REDRAW_S if follow else math.inf)
        if tail is not None:
            seek_lines(self._file, tail)

    def show(self, *, to_the_end: bool) -> None:
        """Prints what was added since; ``to_the_end`` also a last line that has no end yet."""
        while data := self._file.read(PIECE):
            self._print(self._lines.feed(data, time.monotonic()))
        if to_the_end:
            self._print(self._lines.rest())
        sys.stdout.flush()

    def _print(self, lines: list[bytes]) -> None:
        for line in lines:
            text = clean(self._label + line.decode(errors="replace"), sys.stdout.isatty())
            sys.stdout.write(text + "\n")
