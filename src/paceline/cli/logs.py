"""``paceline logs``: what the ranks of a run have written, and go on writing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from paceline.cli.runs import find_run, look_at
from paceline.cli.verb import Verb
from paceline.cluster.records import open_regular
from paceline.diagnose.gather import log_files, rank_of
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError
from paceline.spec.terminal import clean

LOOK_EVERY_S = 0.3
PIECE = 1 << 20  # bytes read at once, and the longest line that is kept whole


@click.command("logs", cls=Verb)
@click.argument("run", required=False)
@click.option("--rank", type=click.IntRange(0), help="Only this rank.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over.")
def command(run: str | None, rank: int | None, follow: bool) -> None:
    """Print the logs of RUN (the newest below runs/), each line labelled HOST/RANK."""
    path = find_run(run)
    readers: dict[Path, Reader] = {}
    while True:
        over = not follow or look_at(path).over
        for file in logs_of(path, rank):
            if file not in readers:
                readers[file] = Reader(file)
            readers[file].show()
        if over:
            break
        time.sleep(LOOK_EVERY_S)
    if not readers and rank is not None:
        raise SettingError(f"{path} has no log of rank {rank}")


def logs_of(path: Path, rank: int | None) -> list[Path]:
    """Log files of ranks, in the order of the ranks."""
    found = [(number, file) for file in log_files(path / names.LOGS)
             if (number := rank_of(file)) is not None]  # fmt: skip
    return [file for number, file in sorted(found) if rank is None or number == rank]


class Reader:
    """Shows what is added to one log, whole lines only until the end."""

    def __init__(self, path: Path) -> None:
        self._label = f"[{path.parent.name}/{path.stem}] "
        self._file = open_regular(path)
        self._rest = b""

    def show(self) -> None:
        colours = sys.stdout.isatty()
        for line in self._lines():
            text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")
            sys.stdout.write(clean(self._label + text, colours) + "\n")
        sys.stdout.flush()

    def _lines(self) -> Iterator[bytes]:
        """What was added since, line by line; a line that never ends in pieces of it."""
        while data := self._file.read(PIECE):
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from whole
            if len(self._rest) > PIECE:
                yield self._rest
                self._rest = b""
