"""How a run ends: somebody asks for it, all ranks learn of it, and each leaves in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.spec import jobenv
from paceline.spec.errors import JobError
from paceline.train.comms import Comms
from paceline.train.elastic import gloo

_STOP = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: what batch systems are asked to send early
_SAVE = (signal.SIGUSR2,)
SECONDS = 0.5
MIN_REPEAT_S = 2.0  # a scheduler and the launcher may both pass on one and the same request
_MOST_STEPS = 64  # steps may become slower at any time: evaluation, a busy disk
_LOOKS = 3
_MOST_SECONDS = 2.0


class Stopped(JobError):
    """The training was asked to stop, and its state is saved; raised on every rank."""

    exit_code = 143  # as a process that SIGTERM ended


class Quietly(SystemExit):
    """The same where no launcher of ours shows what a rank raises: one rank has said why."""


class Notice:
    """Takes the signals while it is open; the training looks at it at every poll.

    Attributes:
        stop: Name of the signal that asked to stop; empty while none has.
        save: True when a checkpoint was asked for.
    """

    def __init__(self) -> None:
        self.stop = ""
        self.save = False
        self._before: dict[int, object] = {}
        self._launched = jobenv.EVENT_FD in os.environ
        self._stop_at = 0.0

    def open(self) -> None:
        """Begins to listen, where this is the main thread (signals go nowhere else)."""
        if threading.current_thread() is threading.main_thread():
            for number in (*_STOP, *_SAVE):
                self._before[number] = signal.signal(number, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        if number in _SAVE:
            self.save = True
            return
        if not self.stop:
            self.stop, self._stop_at = signal.Signals(number).name, time.monotonic()
        elif not self._launched and time.monotonic() - self._stop_at > MIN_REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Puts the former handlers back, unless the launcher is ending this process anyway."""
        if self.stop and self._launched:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What any rank wished when all were asked.

    Attributes:
        save: For whatever reason.
        asked: Number of the last checkpoint that the launcher asked for; what is newer than any
            rank has answered is a wish of all.
        fresh: It is such a one.
    """

    stop: bool
    save: bool
    asked: int = 0
    fresh: bool = False


class Door(Protocol):
    """Where others come in, once all ranks know that they are there.

    Attributes:
        alone: This rank is the only one as far as it knows, and is to save and end.
    """

    alone: bool

    def knocked(self) -> int:
        """Number of the group in which others are to join, as far as this rank knows; 0: none."""

    def agreed(self, least: int, most: int) -> None:
        """Takes the least and the largest number that any rank knows."""

    def parts(self) -> None:
        """All ranks have agreed to save and end: none of them does so alone any more."""


class Poll:
    """A moment, about twice a second, at which all ranks look up from their work together.

    Asking everybody after every step whether it was told to stop would cost more than the step of
    a small model. So the ranks agree each time, with one small reduction, on how many steps there
    are to be until the next. Every rank must count the same steps.

    Args:
        comms: Of all ranks.
        door: Is told which group all ranks know of; ``None``: nobody can join.
        seconds: Aimed-at time between two polls.
    """

    def __init__(self, comms: Comms, door: Door | None = None, seconds: float = SECONDS) -> None:
        self._comms, self._door, self._seconds = comms, door, seconds
        self._left, self._last, self._counted = 1, 1, 0
        self._since = time.monotonic()

    def due(self) -> bool:
        """Counts one step; True when every rank must call :meth:`ask` now."""
        self._left -= 1
        self._counted += 1
        return self._left <= 0

    def ask(
        self, *, stop: bool = False, save: bool = False, asked: int = 0, answered: int = 0
    ) -> Wishes:
        """Tells the others this rank's wishes and learns theirs.

        Args:
            stop, save: What it wishes itself.
            asked, answered: Number of the last checkpoint that the launcher asked of it for, and
                of the last that was made for that.
        """
        now = time.monotonic()
        a_step = (now - self._since) / max(1, self._counted)
        knocked = 0 if self._door is None else self._door.knocked()
        mine = [float(stop), float(save), a_step, float(knocked), -float(knocked)]
        wishes = self._comms.most(torch.tensor([*mine, float(asked), float(answered)]))
        if self._door is not None:
            self._door.agreed(-int(wishes[4]), int(wishes[3]))
        self._since, self._counted = now, 0
        self._left = self._last = next_poll(wishes[2], self._seconds, self._last)
        latest, done = int(wishes[5]), int(wishes[6])
        fresh = latest > done  # one that hears of it later finds it answered
        return Wishes(wishes[0] > 0, wishes[1] > 0 or fresh, max(latest, done), fresh)


def next_poll(a_step: float, seconds: float, last: int) -> int:
    """Steps of ``a_step`` seconds until the next poll; at most twice as many as ``last``."""
    return max(1, min(_MOST_STEPS, 2 * last, int(seconds / max(a_step, 1e-9))))


def leave() -> None:
    """Destroys the process group once its threads have nothing left to do.

    A worker thread of gloo lets go of a collective's tensors a moment after the collective has
    returned, and needs the interpreter's lock for it. The group's destructor joins that thread
    without giving the lock away. Met in this moment, neither goes on: without the wait one of 52
    ends of short trainings on a busy host hung for ever, each thread waiting for the other; with
    it none of 222. An interpreter that is torn down in this moment aborts with status -6.
    """
    if not dist.is_initialized():
        return
    wait_for_idle_workers()
    dist.destroy_process_group()


def wait_for_idle_workers() -> None:
    """Sleeping gives the lock away, so a worker that still needs it gets it and is seen running."""
    deadline = time.monotonic() + _MOST_SECONDS
    idle = 0
    while idle < _LOOKS and time.monotonic() < deadline:
        time.sleep(0.002)
        busy = any(one.name == gloo.WORKERS and one.state == "R" for one in gloo.tasks())
        idle = 0 if busy else idle + 1
