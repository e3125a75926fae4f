"""What a rank says: to the launcher where there is one, else to files and the terminal.

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
from typing import Any, Protocol

from paceline.progress import Bar
from paceline.spec import jobenv, rundir
from paceline.spec.formatting import format_epoch
from paceline.train import files

HEARTBEAT_SECONDS = 1.0
PACE_SECONDS = 1.0
PROGRESS_SECONDS = 0.2
LINE_SECONDS = 5.0


class Reporter(Protocol):
    """Where a rank's messages go."""

    def progress(self, **details: Any) -> None: ...
    def metrics(self, **details: Any) -> None: ...
    def event(self, event: str, **details: Any) -> None: ...
    def say(self, text: str) -> None: ...
    def heartbeat(self, step: int, phase: str) -> None: ...
    def pace(self, step: int, look: Callable[[], Mapping[str, Any]]) -> None: ...
    def begin(self, resumed: bool) -> None: ...
    def speak(self, speaks: bool) -> None: ...
    def close(self) -> None: ...


class Silent:
    """For the ranks other than 0 when nobody listens."""

    def progress(self, **details: Any) -> None:
        pass

    def metrics(self, **details: Any) -> None:
        pass

    def event(self, event: str, **details: Any) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def heartbeat(self, step: int, phase: str) -> None:
        pass

    def pace(self, step: int, look: Callable[[], Mapping[str, Any]]) -> None:
        pass

    def begin(self, resumed: bool) -> None:
        pass

    def speak(self, speaks: bool) -> None:
        pass

    def close(self) -> None:
        pass


class ToScreen(Silent):
    """For rank 0 of something that leaves no run directory: text only."""

    def say(self, text: str) -> None:
        print(text, flush=True)


class ToLauncher:
    """JSON lines on the launcher's descriptor; rank 0 speaks for the job, all ranks for themselves.

    Args:
        descriptor: An open file descriptor.
        speaks: True on the rank that reports progress, metrics and text (rank 0).
    """

    def __init__(self, descriptor: int, speaks: bool) -> None:
        self._descriptor: int | None = descriptor
        self._speaks = speaks
        self._progress = _Every(PROGRESS_SECONDS)
        self._heartbeat = _Every(HEARTBEAT_SECONDS)
        self._pace = _Every(PACE_SECONDS)
        self._phase = ""  # that was told last

    def progress(self, **details: Any) -> None:
        if self._speaks and self._progress.due(last=details["step"] == details["steps"]):
            self._send(kind="progress", **details)

    def metrics(self, **details: Any) -> None:
        if self._speaks:
            self._send(kind="metrics", **details)

    def event(self, event: str, **details: Any) -> None:
        self._send(kind="event", event=event, **details)

    def say(self, text: str) -> None:
        if self._speaks:
            self._send(kind="say", text=text)

    def heartbeat(self, step: int, phase: str) -> None:
        if self._heartbeat.due(last=phase != self._phase):
            self._phase = phase
            self._send(kind="heartbeat", step=step, phase=phase)

    def pace(self, step: int, look: Callable[[], Mapping[str, Any]]) -> None:
        """Tells where the time of all ranks' steps went; that is asked for only when it is due."""
        if self._speaks and self._pace.due():
            self._send(kind="pace", step=step, **look())

    def begin(self, resumed: bool) -> None:
        if self._speaks:
            self._send(kind="begin", resumed=resumed)

    def speak(self, speaks: bool) -> None:
        """Whether this rank is the one that speaks for the job, from now on."""
        self._speaks = speaks

    def close(self) -> None:
        self._descriptor = None

    def _send(self, **message: Any) -> None:
        if self._descriptor is None:
            return
        line = files.line(message)
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:  # the launcher is gone; whoever ends the job is not this function
            self._descriptor = None


class ToFolder:
    """Rank 0 without a launcher: files in the run directory, progress on the terminal.

    Args:
        folder: The run directory; made when it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = files.Records(folder / rundir.METRICS)
        self._events = files.Records(folder / rundir.EVENTS)
        self._screen = _screen()

    def begin(self, resumed: bool) -> None:
        if not resumed:
            self._metrics.set_aside()
        self._metrics.skip_known()

    def progress(self, **details: Any) -> None:
        self._screen.progress(**details)

    def metrics(self, **details: Any) -> None:
        if self._metrics.append({"time": round(time.time(), 3), **details}):
            self._screen.metrics(**details)

    def event(self, event: str, **details: Any) -> None:
        now = round(time.time(), 4)
        self._events.append({"time": now, "event": event, "rank": 0, **details})

    def say(self, text: str) -> None:
        self._screen.say(text)

    def heartbeat(self, step: int, phase: str) -> None:
        pass

    def pace(self, step: int, look: Callable[[], Mapping[str, Any]]) -> None:
        pass

    def speak(self, speaks: bool) -> None:
        pass

    def close(self) -> None:
        self._screen.close()


def reporter(
    environ: Mapping[str, str], rank: int, folder: Path, *, quiet: bool = False
) -> Reporter:
    """The reporter for this process; a quiet one keeps no files."""
    descriptor = environ.get(jobenv.EVENT_FD, "")
    if descriptor.isdecimal():
        return ToLauncher(int(descriptor), speaks=rank == 0)
    if rank:
        return Silent()
    return ToScreen() if quiet else ToFolder(folder)


class _Every:
    """A gate that opens at most once in so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def due(self, last: bool = False) -> bool:
        now = time.monotonic()
        if not last and now < self._next:
            return False
        self._next = now + self._seconds
        return True


class Screen(Protocol):
    """How rank 0 draws when it draws itself."""

    def progress(self, **details: Any) -> None: ...
    def metrics(self, **details: Any) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainScreen:
    """Lines: for pipes, files and batch systems. Training records are thinned out by time."""

    def __init__(self) -> None:
        self._gate = _Every(LINE_SECONDS)
        self._eta = Eta()

    def progress(self, **details: Any) -> None:
        self._eta.update(details["step"], details["steps"])

    def metrics(self, **details: Any) -> None:
        if details.get("split") == "train" and self._gate.due():
            left = f", {self._eta.left()} left" if self._eta.known else ""
            print(plain(details) + left, flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class Eta:
    """Time until the end, from the steps since the first that was seen."""

    def __init__(self) -> None:
        self._first = self._step = self._steps = 0
        self._since = 0.0

    @property
    def known(self) -> bool:
        return self._step > self._first

    def update(self, step: int, steps: int) -> None:
        """Takes the number of done steps, of so many."""
        if not self._since:
            self._first, self._since = step, time.monotonic()
        self._step, self._steps = step, steps

    def left(self) -> str:
        """As ``h:mm:ss``."""
        a_step = (time.monotonic() - self._since) / max(1, self._step - self._first)
        minutes, seconds = divmod(round(a_step * (self._steps - self._step)), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class BarScreen:
    """A live progress bar on a terminal."""

    def __init__(self) -> None:
        self._bar = Bar(stays=True)
        self._gate = _Every(PROGRESS_SECONDS)

    def progress(self, **details: Any) -> None:
        if self._gate.due(last=details["step"] == details["steps"]):
            self._bar.update(details)

    def metrics(self, **details: Any) -> None:
        pass

    def say(self, text: str) -> None:
        self._bar.print(text)

    def close(self) -> None:
        self._bar.stop()


def plain(details: Mapping[str, Any]) -> str:
    """A metrics record as one readable line."""
    known = {"epoch", "step", "split"}
    values = {name: value for name, value in details.items() if name not in known}
    return figures(details["epoch"], details["step"], 0, [(details["split"], values)])


def figures(
    epoch: int, step: int, steps: int, parts: Sequence[tuple[str, Mapping[str, Any]]]
) -> str:
    """``epoch 1  step 46/345  train: loss 0.3121, accuracy 0.9  test: loss 0.2954``.

    Args:
        epoch: As the loop over epochs counts them, from 0; people are told it from 1.
        step: Global steps done.
        steps: Of the whole training; 0 leaves them out.
        parts: Values by the name of their split.
    """
    words = [format_epoch(epoch), f"step {step}/{steps}" if steps else f"step {step}"]
    for split, values in parts:
        shown = [f"{name} {_short(value)}" for name, value in values.items() if name != "samples"]
        words.append(f"{split}: {', '.join(shown)}")
    return "  ".join(words)


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _screen() -> Screen:
    return BarScreen() if sys.stdout.isatty() else PlainScreen()
