"""A job that a scheduler starts later: handed in, followed, and found again from elsewhere."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.rundir import detached_file, records
from paceline.rundir.arrivals import Arrivals
from paceline.schedulers import SCHEDULERS, load
from paceline.schedulers.scheduler import JobState, Scheduler
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.rundir import BATCH

# Scheduler and job id, by which status, logs and stop find the job; and the command that was typed.
BATCH_FILE = BATCH
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was handed in.

    Attributes:
        scheduler: To which.
        job: Its id there.
        outputs: Files that its output is written to, as far as they are known.
    """

    scheduler: Scheduler
    job: str
    outputs: tuple[Path, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.scheduler.title} job {self.job}"

    def cancel(self, kill: bool = False) -> None:
        self.scheduler.cancel(self.job, kill)

    def state(self) -> JobState | None:
        """As the scheduler sees it just now."""
        import asyncio  # here: a run of another kind needs none

        return asyncio.run(self.scheduler.poll(self.job))


def hand_in(scheduler: Scheduler, text: str, directory: Path, array: bool = False,
            typed: str = "") -> Submitted:  # fmt: skip
    """Writes the script into the run directory, submits it, and records its id there.

    Args:
        scheduler: Which.
        text: What it has rendered.
        directory: The run directory; it is made.
        array: The job is many, each with an output of its own.
        typed: The command that submits it, without secrets.

    Raises:
        SettingError: The scheduler refuses it, in its own words.
    """
    directory.mkdir(parents=True, exist_ok=True)
    Arrivals(directory)  # before anything else lies there: see its _is_own
    script = directory / scheduler.script
    script.write_text(text, encoding="utf-8")
    job = scheduler.submit(script)
    output = scheduler.output.replace("{job}", job)
    record = {"scheduler": scheduler.name, "job": job, "output": output, "typed": typed}
    with contextlib.suppress(SettingError):  # without a seal the job is there all the same
        record[detached_file.SEAL] = detached_file.make_seal(record, directory)
    (directory / BATCH_FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")
    return Submitted(scheduler, job, () if array else (directory / output,))


def typed_for(directory: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The words that submitted the batch in which we are; empty where we are in none of ours."""
    found, record = found_in(directory), records.read_object(directory / BATCH_FILE) or {}
    if found is None or found.scheduler.allocation(environ) != found.job:
        return ()
    try:
        return tuple(shlex.split(str(record.get("typed", ""))))
    except ValueError:  # somebody has changed it
        return ()


def found_in(directory: Path) -> Submitted | None:
    """The job that a run directory belongs to, if to one."""
    record = records.read_object(directory / BATCH_FILE) or {}
    name, job = record.get("scheduler"), str(record.get("job", ""))[:40]
    if name not in SCHEDULERS:
        return None
    scheduler = load(str(name))
    known = scheduler.follows() and re.fullmatch(scheduler.job_id, job)
    return Submitted(scheduler, job) if known else None


def demand_own(directory: Path, job: Submitted) -> None:
    """SettingError unless this user handed in the job whose id is in a run's folder.

    The folder may come from anybody, and name any job of this user.
    """
    if not detached_file.has_valid_seal(
        records.read_object(directory / BATCH_FILE) or {}, directory
    ):
        raise SettingError(
            f"{directory / BATCH_FILE} was not written by you for this folder: {job.title} is left"
            " alone",
            remedy=f"If it is this run's, end it by {job.scheduler.title}'s own command",
        )


async def follow(job: Submitted, note: Callable[[str], None], cancel: bool = True) -> int:
    """Shows a job's output, and the scheduler's words for its state, until it is over.

    Args:
        job: Which.
        note: Told of every new state.
        cancel: Ctrl-C cancels the job; else it only ends the following.

    Returns:
        The job's exit status.

    Raises:
        ConnectError: The scheduler does not know the job.
    """
    tails = [Tail(path) for path in job.outputs]
    stop = Stopper(job, cancel)
    last = seen = ""
    try:
        while True:
            state = await job.scheduler.poll(job.job)
            for tail in tails:
                tail.show()
            if state is None:
                raise _unknown(job)
            if state.describe() != last and not state.passing:
                last = state.describe()
                note(f"paceline: {job.title}: {last}")
            returns = state.may_return and seen != state.word
            if (state.over and not returns) or stop.left:
                return stop.exit_code or state.exit_code
            seen = state.word
            await stop.wait(LOOK_EVERY_S)
    finally:
        stop.close()
        for tail in tails:
            tail.show()
            tail.close()


def _unknown(job: Submitted) -> ConnectError:
    return ConnectError(
        f"{job.scheduler.title} does not know job {job.job} (any more)",
        found="it said nothing of it",
        remedy=job.scheduler.history.replace("{job}", job.job),
    )


@dataclass
class Tail:
    """Shows what is added to a file that may not exist yet."""

    path: Path
    _file: IO[bytes] | None = None

    def show(self) -> None:
        if self._file is None and self.path.exists():
            self._file = self.path.open("rb")
        if self._file is not None and (data := self._file.read()):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Stopper:
    """Ctrl-C while following: once cancels the job, twice kills it."""

    def __init__(self, job: Submitted, cancel: bool) -> None:
        self.exit_code = 0
        self.left = False
        self._job = job
        import asyncio

        from paceline.launch.interrupts import Echoes

        self._cancel = cancel
        self._echoes = Echoes()
        self._received = asyncio.Event()
        for one in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(one, self._take, one)

    def _take(self, signum: int) -> None:
        if self._echoes.echoes(signum):
            return
        again = self.exit_code != 0
        self.exit_code = 128 + signum
        self.left = not self._cancel
        self._received.set()
        if self._cancel:
            self._job.cancel(kill=again)

    async def wait(self, seconds: float) -> None:
        """Sleeps, or until the next signal."""
        import asyncio

        try:
            await asyncio.wait_for(self._received.wait(), seconds)
        except asyncio.TimeoutError:
            return
        self._received.clear()

    def close(self) -> None:
        import asyncio

        for one in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(one)


_SIGNALS: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)
