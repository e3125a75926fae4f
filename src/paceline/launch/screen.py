"""What the user sees while a job runs: labelled lines, notes, one progress bar."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TextIO, cast

from paceline.launch.outlet import Outlet
from paceline.spec.job import Show

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red
REDRAW_S = 5.0  # how often a line that only returns the carriage is shown again
PLAIN_PROGRESS_S = 5.0
MAX_PARTIAL = 1 << 16


class Lines:
    """Cuts one stream of a rank into lines."""

    def __init__(self) -> None:
        self._partial = b""
        self._redrawn = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that are now whole, without their ends.

        A line rewritten by carriage returns (another program's progress bar) is given at most
        every ``REDRAW_S`` seconds, in its latest state.
        """
        *lines, self._partial = (self._partial + data).split(b"\n")
        found = [line.rsplit(b"\r", 1)[-1] for line in (part.rstrip(b"\r") for part in lines)]
        if b"\r" in self._partial and now - self._redrawn > REDRAW_S:
            self._redrawn = now
            found.append(self._partial.rstrip(b"\r").rsplit(b"\r", 1)[-1])
            self._partial = b""
        if len(self._partial) > MAX_PARTIAL:
            found.append(self._partial)
            self._partial = b""
        return found

    def rest(self) -> list[bytes]:
        """What was written without an end of line."""
        rest, self._partial = self._partial, b""
        return [rest] if rest else []


class Screen:
    """Writes to the terminal, or plainly to whatever standard output is.

    Args:
        show: Whose output is shown.
        out, err: Where the ranks' two streams go; notes and progress go to ``err``.
    """

    def __init__(self, show: Show = "all", out: TextIO | None = None,
                 err: TextIO | None = None) -> None:  # fmt: skip
        self._show = show
        self._out = Outlet(out or sys.stdout)
        self._err = Outlet(err or sys.stderr)
        self._colour = self._out.isatty()
        self._lines: dict[tuple[str, int, str], Lines] = {}
        self._muted: set[tuple[str, int]] = set()
        self._hosts: dict[str, int] = {}
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._plain_at = float("-inf")

    @property
    def terminal(self) -> bool:
        """True when progress is drawn."""
        return self._err.isatty()

    def output(self, host: str, rank: int, stream: str, data: bytes) -> None:
        """Shows what a rank wrote, line by line, labelled."""
        if self._show == "none" or (self._show == "rank0" and rank != 0):
            return
        lines = self._lines.setdefault((host, rank, stream), Lines())
        for line in lines.feed(data, time.monotonic()):
            self._labelled(host, rank, stream, line)

    def mute(self, host: str, rank: int) -> None:
        """Shows no more of a rank's error stream: its traceback is shown once, at the end."""
        self._muted.add((host, rank))

    def flush(self) -> None:
        """Shows unfinished lines."""
        for (host, rank, stream), lines in self._lines.items():
            for line in lines.rest():
                self._labelled(host, rank, stream, line)

    def _labelled(self, host: str, rank: int, stream: str, line: bytes) -> None:
        if stream == "err" and (host, rank) in self._muted:
            return
        label = f"[{host}/{rank}]"
        if self._colour:
            number = self._hosts.setdefault(host, len(self._hosts))
            label = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{label}\x1b[0m"
        target = self._out if stream == "out" else self._err
        self._write(target, f"{label} {line.decode(errors='replace')}")

    def say(self, text: str) -> None:
        """A line of the job for the user, without label, on standard output."""
        self._write(self._out, text)

    def note(self, text: str) -> None:
        """A line of ours, on standard error."""
        self._write(self._err, text)

    def _write(self, target: Outlet, text: str) -> None:
        if self._progress is not None and target.isatty():
            self._progress.console.out(text, highlight=False)
            return
        target.write(text + "\n")

    # --- progress ----------------------------------------------------------------------------

    def progress(self, said: dict[str, Any]) -> None:
        """Draws where the job is, or now and then prints a line when there is no terminal."""
        if self.terminal:
            self._draw(said)
            return
        now = time.monotonic()
        if said.get("loss") is None:
            return  # nothing is known yet
        if now - self._plain_at >= PLAIN_PROGRESS_S:
            self._plain_at = now
            self.note(describe_progress(said))

    def _draw(self, said: dict[str, Any]) -> None:
        if self._progress is None:
            self._begin_drawing()
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(
            self._task,
            total=said.get("steps"),
            completed=said.get("step", 0),
            description=describe_progress(said, short=True),
        )

    def _begin_drawing(self) -> None:
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
            console=Console(file=cast(TextIO, self._err)),
            transient=True,
        )
        self._task = self._progress.add_task("")
        self._progress.start()

    def close(self) -> None:
        """Takes the bar away, shows what is unfinished and waits until it was taken."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self.flush()
        self._out.close()
        self._err.close()


def describe_progress(said: dict[str, Any], short: bool = False) -> str:
    """``epoch 2/5  step 40/140  loss 0.3100  812 samples/s``."""
    parts = []
    if "epoch" in said:
        of = f"/{said['epochs']}" if said.get("epochs") else ""
        parts.append(f"epoch {said['epoch']}{of}")
    if not short and "step" in said:
        of = f"/{said['steps']}" if said.get("steps") else ""
        parts.append(f"step {said['step']}{of}")
    if isinstance(said.get("loss"), (int, float)):
        parts.append(f"loss {said['loss']:.4f}")
    if isinstance(said.get("samples_per_s"), (int, float)):
        parts.append(f"{said['samples_per_s']:,.0f} samples/s")
    return "  ".join(parts)
