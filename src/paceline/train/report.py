"""Reports of a rank: to the launcher if there is one, else to files and the terminal.

With the launcher's event descriptor every message is one JSON line on it, and the launcher keeps
``metrics.jsonl`` and ``events.jsonl``. Without it rank 0 keeps these files and draws the progress
itself. A message that cannot be delivered never stops the training.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.progress import Bar
from paceline.spec import jobenv, rundir
from paceline.spec.formatting import format_epoch
from paceline.train import files

HEARTBEAT_INTERVAL_S = 1.0
TIMINGS_INTERVAL_S = 1.0
PROGRESS_INTERVAL_S = 0.2
LINE_INTERVAL_S = 5.0


class Reporter:
    """Where a rank's messages go; this base class discards them."""

    def progress(self, **details: Any) -> None: ...
    def metrics(self, **details: Any) -> None: ...
    def event(self, event: str, **details: Any) -> None: ...
    def message(self, text: str) -> None: ...
    def heartbeat(self, step: int, phase: str) -> None: ...
    def timings(self, step: int, read: Callable[[], Mapping[str, Any]]) -> None: ...
    def start(self, resumed: bool) -> None: ...
    def set_speaker(self, speaks: bool) -> None: ...
    def close(self) -> None: ...


class ScreenReporter(Reporter):
    """Prints messages only: for rank 0 of a session without a run directory."""

    def message(self, text: str) -> None:
        print(text, flush=True)


class LauncherReporter(Reporter):
    """Writes JSON lines to the launcher's descriptor; only rank 0 reports for the whole job.

    Args:
        speaks: True on the rank that reports progress, metrics and text (rank 0).
    """

    def __init__(self, descriptor: int, speaks: bool) -> None:
        self._descriptor: int | None = descriptor
        self._is_speaker = speaks
        self._progress = _RateLimit(PROGRESS_INTERVAL_S)
        self._heartbeat = _RateLimit(HEARTBEAT_INTERVAL_S)
        self._timings_limit = _RateLimit(TIMINGS_INTERVAL_S)
        self._phase = ""  # that was sent last

    def progress(self, **details: Any) -> None:
        if self._is_speaker and self._progress.is_open(force=details["step"] == details["steps"]):
            self._send(kind="progress", **details)

    def metrics(self, **details: Any) -> None:
        if self._is_speaker:
            self._send(kind="metrics", **details)

    def event(self, event: str, **details: Any) -> None:
        self._send(kind="event", event=event, **details)

    def message(self, text: str) -> None:
        if self._is_speaker:
            self._send(kind="say", text=text)

    def heartbeat(self, step: int, phase: str) -> None:
        if self._heartbeat.is_open(force=phase != self._phase):
            self._phase = phase
            self._send(kind="heartbeat", step=step, phase=phase)

    def timings(self, step: int, read: Callable[[], Mapping[str, Any]]) -> None:
        """Sends the parts of all ranks' steps; calls ``read`` only when the interval has passed."""
        if self._is_speaker and self._timings_limit.is_open():
            self._send(kind="pace", step=step, **read())

    def start(self, resumed: bool) -> None:
        if self._is_speaker:
            self._send(kind="begin", resumed=resumed)

    def set_speaker(self, speaks: bool) -> None:
        self._is_speaker = speaks

    def close(self) -> None:
        self._descriptor = None

    def _send(self, **message: Any) -> None:
        if self._descriptor is None:
            return
        line = files.json_line(message)
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:  # the launcher is gone; whoever ends the job is not this function
            self._descriptor = None


class FolderReporter(Reporter):
    """Rank 0 without a launcher: files in the run directory, progress on the terminal."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = files.RecordFile(folder / rundir.METRICS)
        self._events = files.RecordFile(folder / rundir.EVENTS)
        self._screen: Screen = BarScreen() if sys.stdout.isatty() else LineScreen()

    def start(self, resumed: bool) -> None:
        if not resumed:
            self._metrics.back_up()
        self._metrics.skip_recorded()

    def progress(self, **details: Any) -> None:
        self._screen.progress(**details)

    def metrics(self, **details: Any) -> None:
        if self._metrics.append({"time": round(time.time(), 3), **details}):
            self._screen.metrics(**details)

    def event(self, event: str, **details: Any) -> None:
        time_s = round(time.time(), 4)
        self._events.append({"time": time_s, "event": event, "rank": 0, **details})

    def message(self, text: str) -> None:
        self._screen.message(text)

    def close(self) -> None:
        self._screen.close()


def reporter(
    environ: Mapping[str, str], rank: int, folder: Path, *, quiet: bool = False
) -> Reporter:
    """The reporter for this process; a quiet one keeps no files."""
    if environ.get(jobenv.EVENT_FD, "").isdecimal() or rank:
        return to_launcher(environ, rank)
    return ScreenReporter() if quiet else FolderReporter(folder)


def to_launcher(environ: Mapping[str, str], rank: int) -> Reporter:
    """The reporter to the launcher; without one, it discards messages."""
    descriptor = environ.get(jobenv.EVENT_FD, "")
    if not descriptor.isdecimal():
        return Reporter()
    return LauncherReporter(int(descriptor), speaks=rank == 0)


class _RateLimit:
    """Allows an action at most once in so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def is_open(self, force: bool = False) -> bool:
        time_s = time.monotonic()
        if not force and time_s < self._next:
            return False
        self._next = time_s + self._seconds
        return True


class Screen:
    """Terminal output of rank 0 without a launcher."""

    def progress(self, **details: Any) -> None: ...
    def metrics(self, **details: Any) -> None: ...
    def close(self) -> None: ...

    def message(self, text: str) -> None:
        print(text, flush=True)


class LineScreen(Screen):
    """Lines: for pipes, files and batch systems. Training records are thinned out by time."""

    def __init__(self) -> None:
        self._gate = _RateLimit(LINE_INTERVAL_S)
        self._eta = Eta()

    def progress(self, **details: Any) -> None:
        self._eta.update(details["step"], details["steps"])

    def metrics(self, **details: Any) -> None:
        if details.get("split") == "train" and self._gate.is_open():
            eta = f", {self._eta.remaining()} left" if self._eta.is_known else ""
            self.message(format_record(details) + eta)


class Eta:
    """Time until the end, from the steps since the first that was seen."""

    def __init__(self) -> None:
        self._first = self._step = self._steps = 0
        self._start = 0.0

    @property
    def is_known(self) -> bool:
        return self._step > self._first

    def update(self, step: int, steps: int) -> None:
        if not self._start:
            self._first, self._start = step, time.monotonic()
        self._step, self._steps = step, steps

    def remaining(self) -> str:
        a_step = (time.monotonic() - self._start) / max(1, self._step - self._first)
        minutes, seconds = divmod(round(a_step * (self._steps - self._step)), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class BarScreen(Screen):
    """A live progress bar on a terminal."""

    def __init__(self) -> None:
        self._bar = Bar(stays=True)
        self._gate = _RateLimit(PROGRESS_INTERVAL_S)

    def progress(self, **details: Any) -> None:
        if self._gate.is_open(force=details["step"] == details["steps"]):
            self._bar.update(details)

    def message(self, text: str) -> None:
        self._bar.print(text)

    def close(self) -> None:
        self._bar.stop()


def format_record(details: Mapping[str, Any]) -> str:
    """A metrics record as one readable line."""
    values = {key: details[key] for key in details if key not in ("epoch", "step", "split")}
    return format_values(details["epoch"], details["step"], 0, [(details["split"], values)])


def format_values(
    epoch: int, step: int, steps: int, parts: Sequence[tuple[str, Mapping[str, Any]]]
) -> str:
    """``epoch 1  step 46/345  train: loss 0.3121, accuracy 0.9  test: loss 0.2954``.

    Args:
        epoch: As the loop over epochs counts them, from 0; people are told it from 1.
        steps: Of the whole training; 0 leaves them out.
    """
    columns = [format_epoch(epoch), f"step {step}/{steps}" if steps else f"step {step}"]
    for split, values in parts:
        texts = [
            f"{name} {_format_value(value)}" for name, value in values.items() if name != "samples"
        ]
        columns.append(f"{split}: {', '.join(texts)}")
    return "  ".join(columns)


def _format_value(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
