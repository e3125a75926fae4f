"""How a run ends: somebody asks for it, all ranks learn of it, and each leaves in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from paceline.spec import jobenv
from paceline.spec.errors import JobError
from paceline.train.comms import Comms
from paceline.train.elastic.gloo import wait_for_idle_workers
from paceline.train.elastic.recovery import Recovery

_STOP = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: what batch systems are asked to send early
_SAVE = (signal.SIGUSR2,)
POLL_INTERVAL_S = 0.5
MIN_REPEAT_S = 2.0  # a scheduler and the launcher may both pass on one and the same request
_MAX_STEPS = 64  # steps may become slower at any time: evaluation, a busy disk


class Stopped(JobError):
    """The training was asked to stop, and its state is saved; raised on every rank."""

    exit_code = 143  # as a process that SIGTERM ended


class QuietExit(SystemExit):
    """The exit of a rank without launcher when another has printed the reason."""


class SignalNotice:
    """Handles signals while it is open; the training polls it.

    Attributes:
        stop: Name of the signal that asked to stop; empty while none has.
        save: True when a checkpoint was asked for.
    """

    def __init__(self) -> None:
        self.stop = ""
        self.save = False
        self._former_handlers: dict[int, object] = {}
        self._launched = jobenv.EVENT_FD in os.environ
        self._stop_at = 0.0

    def open(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (*_STOP, *_SAVE):
                self._former_handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number in _SAVE:
            self.save = True
            return
        if not self.stop:
            self.stop, self._stop_at = signal.Signals(number).name, time.monotonic()
        elif not self._launched and time.monotonic() - self._stop_at > MIN_REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Restores the former handlers unless the launcher is ending this process."""
        if self.stop and self._launched:
            return
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._former_handlers.clear()


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of any rank at a poll.

    Attributes:
        save: A checkpoint is to be made, for whatever reason.
        save_number: Number of the last checkpoint that the launcher asked any rank for.
        is_new_request: No rank has made that checkpoint yet.
    """

    stop: bool
    save: bool
    save_number: int = 0
    is_new_request: bool = False


class Poll:
    """A moment, about twice a second, at which all ranks look up from their work together.

    Asking everybody after every step whether it was told to stop would cost more than the step of
    a small model. So the ranks agree each time, with one small reduction, on how many steps there
    are to be until the next. Every rank must count the same steps.

    Args:
        recovery: Is told the generation that all ranks know of; ``None``: no process can join.
    """

    def __init__(self, comms: Comms, recovery: Recovery | None = None) -> None:
        self._comms, self._recovery = comms, recovery
        self.restart()

    def restart(self) -> None:
        """Makes every step a moment again until their pace is known; on every rank at once."""
        self._remaining, self._interval, self._num_steps = 1, 1, 0
        self._start = time.monotonic()

    def is_due(self) -> bool:
        """Counts one step; returns whether every rank must call :meth:`exchange` now."""
        self._remaining -= 1
        self._num_steps += 1
        return self._remaining <= 0

    def exchange(
        self,
        *,
        stop: bool = False,
        save: bool = False,
        save_number: int = 0,
        answered_number: int = 0,
    ) -> Requests:
        """Sends this rank's requests and returns those of all.

        Args:
            stop, save: Whether this rank asks to stop, or for a checkpoint.
            save_number, answered_number: Numbers of the last checkpoint that the launcher asked
                this rank for, and of the last that was made for such a request.
        """
        time_s = time.monotonic()
        step_s = (time_s - self._start) / max(1, self._num_steps)
        pending = 0 if self._recovery is None else self._recovery.pending_generation()
        local_values = [stop, save, step_s, pending, -pending, save_number, answered_number]
        values = self._comms.max(torch.tensor(local_values, dtype=torch.float32))
        if self._recovery is not None:
            self._recovery.agree_to_join(-int(values[4]), int(values[3]))
        self._start, self._num_steps = time_s, 0
        self._remaining = self._interval = next_poll(values[2], POLL_INTERVAL_S, self._interval)
        latest, answered = int(values[5]), int(values[6])
        is_new_request = latest > answered  # one that hears of it later finds it answered
        return Requests(
            values[0] > 0, values[1] > 0 or is_new_request, max(latest, answered), is_new_request
        )


def next_poll(step_s: float, seconds: float, former: int) -> int:
    """Returns steps of ``step_s`` seconds until the next poll; at most twice ``former``."""
    return max(1, min(_MAX_STEPS, 2 * former, int(seconds / max(step_s, 1e-9))))


def destroy_process_group() -> None:
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
