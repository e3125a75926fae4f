"""``paceline logs``: what the ranks of a run have written, and go on writing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click

from paceline.cli.runs import find_run, look_at
from paceline.cli.verb import Verb
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError

LOOK_EVERY_S = 0.3


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
            readers.setdefault(file, Reader(file)).show()
        if over:
            break
        time.sleep(LOOK_EVERY_S)
    if not readers and rank is not None:
        raise SettingError(f"{path} has no log of rank {rank}")


def logs_of(path: Path, rank: int | None) -> list[Path]:
    """Log files of ranks, in the order of the ranks."""
    found = [file for file in (path / names.LOGS).glob("*/*.log") if file.stem.isdecimal()]
    chosen = [file for file in found if rank is None or int(file.stem) == rank]
    return sorted(chosen, key=lambda file: int(file.stem))


class Reader:
    """Shows what is added to one log, whole lines only until the end."""

    def __init__(self, path: Path) -> None:
        self._label = f"[{path.parent.name}/{path.stem}] ".encode()
        self._file: IO[bytes] = path.open("rb")
        self._rest = b""

    def show(self) -> None:
        for line in self._lines():
            sys.stdout.buffer.write(self._label + line)
        sys.stdout.buffer.flush()

    def _lines(self) -> Iterator[bytes]:
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in whole:
            yield line + b"\n"
