"""Submits a job that a scheduler starts later, follows it, and finds it by its run directory."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.rundir import detached_file, records
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.directory import require_own_place, short, write_text
from paceline.schedulers import SCHEDULERS, load
from paceline.schedulers.scheduler import JobState, Scheduler, array_ranges, array_state
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.failure import UNKNOWN, Result
from paceline.spec.formatting import shell_text
from paceline.spec.rundir import BATCH, RESULT
from paceline.spec.terminal import clean, has_colours

POLL_INTERVAL_S = 0.5
_READ_BYTES = 1 << 20
MAX_TASKS = 10_000  # of an array that are looked for though nothing of them is known


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A submitted job.

    Attributes:
        job: The scheduler's id of it.
        outputs: Files with its output, as far as they are known.
        directory: Its run directory; those of the tasks of an array are below it.
        array: Index range of a job array; empty for other jobs.
    """

    scheduler: Scheduler
    job: str
    outputs: tuple[Path, ...] = ()
    directory: Path = Path()
    array: str = ""

    @property
    def title(self) -> str:
        return f"{self.scheduler.title} job {self.job}"

    def cancel(self, kill: bool = False) -> None:
        self.scheduler.cancel(self.job, kill)

    def state(self) -> JobState | None:
        """Returns the scheduler's present state of the job."""
        import asyncio  # other kinds of runs do not need it

        return asyncio.run(self.poll({}))

    async def poll(self, known: Mapping[int, JobState]) -> JobState | None:
        """Returns the scheduler's present state of the job; ``None`` if it does not know it.

        Schedulers forget the tasks of an array some time after their end, while others still run.

        Args:
            known: States of an array's tasks before.
        """
        state = await self.scheduler.poll(self.job)
        if state is None or not state.tasks:
            return state
        indices = itertools.islice(itertools.chain(*array_ranges(self.array)), MAX_TASKS)
        forgotten = {*known, *self.task_folders(), *indices} - state.tasks.keys()
        ended = {index: known[index] if index in known and known[index].is_over
                 else self._recorded_end(index) for index in forgotten}  # fmt: skip
        return array_state({**state.tasks, **ended})

    def task_folders(self) -> dict[int, Path]:
        """Returns the run directories of an array's tasks that have begun, by index."""
        ranges = array_ranges(self.array)
        folders = {int(folder.name): folder for folder in records.folders_in(self.directory)
                   if ranges and re.fullmatch("[0-9]{1,9}", folder.name)
                   and not records.is_regular(folder / BATCH)}  # fmt: skip
        return {i: folders[i] for i in sorted(folders) if any(i in part for part in ranges)}

    def _recorded_end(self, index: int) -> JobState:
        record = records.read_object(self.directory / str(index) / RESULT)
        code = Result.from_json(record or {}).exit_code
        state = "failed" if code else "finished"
        return JobState(state, is_over=True, exit_code=1 if code == UNKNOWN else code)

    def describe(self, state: JobState) -> str:
        tasks = self.describe_tasks(state)
        return f"{state.describe()}; {tasks}" if tasks else state.describe()

    def describe_tasks(self, state: JobState) -> str:
        """Returns :meth:`JobState.describe_tasks`, and what to type if the array failed."""
        text, failed = state.describe_tasks(), state.failed_tasks()
        if not failed or not state.is_over:
            return text
        folder = self.directory / str(failed[0])
        task = [short(folder)]
        if not folder.is_dir():  # it failed before Paceline began
            output = self.scheduler.output.replace("{job}", f"{self.job}_{failed[0]}")
            task = ["--log", short(self.directory / output)]
        return f"{text}: {shell_text(['paceline', 'explain', *task])}"


def submit_job(scheduler: Scheduler, text: str, directory: Path, array: str = "",
               typed: str = "") -> SubmittedJob:  # fmt: skip
    """Writes the script into the run directory, submits it, and records its id there.

    Args:
        scheduler, text: The scheduler and its script.
        directory: The run directory, which is made.
        array: Index range of an array, whose tasks have outputs of their own.
        typed: The command that submits it, without secrets.

    Raises:
        SettingError: The scheduler refuses it, or the directory cannot be written.
    """
    with _explained(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        require_own_place(directory)
        Arrivals(directory)  # before anything else lies there: see its _is_own
        write_text(directory, scheduler.script, text)
    job = scheduler.submit(directory / scheduler.script)
    output = scheduler.output.replace("{job}", job)
    record = {"scheduler": scheduler.name, "job": job, "output": output, "typed": typed,
              "array": array}  # fmt: skip
    with contextlib.suppress(SettingError):  # without a seal the job is there all the same
        record[detached_file.SEAL] = detached_file.make_seal(record, directory)
    with _explained(directory, f"{scheduler.title} job {job} is submitted"):
        write_text(directory, BATCH, json.dumps(record) + "\n")
    outputs = () if array else (directory / output,)
    return SubmittedJob(scheduler, job, outputs, directory, array)


@contextlib.contextmanager
def _explained(directory: Path, note: str = "") -> Iterator[None]:
    """Raises an OSError as SettingError; ``note`` tells what has been done by then."""
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"cannot write to the run directory {directory}" + (f"; {note}" if note else ""),
            found=f"{error.strerror} ({error.filename or directory})",
            remedy="Give a --run-dir that you may write to",
        ) from None


def submitting_arguments(directory: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the command that submitted the batch we run in; empty outside our batches."""
    submission = read_submission(directory)
    if submission is None or submission.scheduler.allocation(environ) != submission.job:
        return ()
    record = records.read_object(directory / BATCH) or {}
    try:
        return tuple(shlex.split(str(record.get("typed", ""))))
    except ValueError:  # the file was changed
        return ()


def read_submission(directory: Path) -> SubmittedJob | None:
    """Returns the job that a run directory belongs to, if any."""
    record = records.read_object(directory / BATCH) or {}
    name, job = record.get("scheduler"), str(record.get("job", ""))[:40]
    if name not in SCHEDULERS:
        return None
    scheduler = load(str(name))
    is_known = scheduler.can_follow() and re.fullmatch(scheduler.job_id, job)
    array = records.as_text(record.get("array"), 1 << 16)
    return SubmittedJob(scheduler, job, (), directory, array) if is_known else None


def require_own_submission(directory: Path, job: SubmittedJob) -> None:
    """Raises SettingError unless this user submitted the job that a run directory names.

    The directory may come from another user and name any job of this user.
    """
    if not detached_file.has_valid_seal(records.read_object(directory / BATCH) or {}, directory):
        raise SettingError(
            f"{directory / BATCH} was not written by you for this folder: {job.title} is left"
            " alone",
            remedy=f"If it is this run's, end it by {job.scheduler.title}'s own command",
        )


async def follow(job: SubmittedJob, note: Callable[[str], None]) -> int:
    """Shows a job's output and its states until it is over; returns its exit status.

    Args:
        job: The job, which Ctrl-C cancels.
        note: Called with every new state; of an array, also when a task ends.

    Raises:
        ConnectError: The scheduler does not know the job.
    """
    tails = [FileTail(path) for path in job.outputs]
    stop = InterruptHandler(job)
    last_shown = last_word = ""
    tasks: Mapping[int, JobState] = {}
    try:
        while True:
            state = await job.poll(tasks)
            for tail in tails:
                tail.show()
            if state is None:
                raise ConnectError(
                    f"{job.scheduler.title} does not know job {job.job} (any more)",
                    found="it said nothing of it",
                    remedy=job.scheduler.history.replace("{job}", job.job),
                )
            tasks = state.tasks
            if (text := job.describe(state)) != last_shown and not state.is_transient:
                last_shown = text
                note(f"paceline: {job.title}: {text}")
            returns = state.may_return and last_word != state.state
            if state.is_over and not returns:
                return stop.exit_code or state.exit_code
            last_word = state.state
            await stop.wait(POLL_INTERVAL_S)
    finally:
        stop.close()
        for tail in tails:
            tail.show()
            tail.close()


@dataclass
class FileTail:
    """Prints the lines that are appended to a file, which may not exist yet.

    Nodes write it: what could control a terminal is removed, except colours.
    """

    path: Path
    _file: IO[bytes] | None = None
    _partial: bytes = b""

    def show(self) -> None:
        """Prints complete lines, and a very long one in parts."""
        if self._file is None:
            with contextlib.suppress(OSError):
                self._file = records.open_regular(self.path)
        while self._file is not None and (data := self._file.read(_READ_BYTES)):
            *lines, self._partial = (self._partial + data).split(b"\n")
            _print(b"".join(line + b"\n" for line in lines))
            if len(self._partial) > _READ_BYTES:
                _print(self._partial)
                self._partial = b""

    def close(self) -> None:
        """Prints the incomplete last line."""
        _print(self._partial)
        if self._file is not None:
            self._file.close()


def _print(data: bytes) -> None:
    sys.stdout.write(clean(data.decode("utf-8", "replace"), colours=has_colours(sys.stdout)))
    sys.stdout.flush()


class InterruptHandler:
    """Ctrl-C while following: once cancels the job, twice kills it."""

    def __init__(self, job: SubmittedJob) -> None:
        import asyncio

        from paceline.launch.interrupts import EchoFilter

        self.exit_code = 0
        self._job = job
        self._echoes = EchoFilter()
        self._received = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for signum in _SIGNALS:
            self._loop.add_signal_handler(signum, self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        if self._echoes.is_echo(signum):
            return
        is_repeated = self.exit_code != 0
        self.exit_code = 128 + signum
        self._received.set()
        self._job.cancel(kill=is_repeated)

    async def wait(self, seconds: float) -> None:
        """Sleeps until the time is over or a signal arrives."""
        import asyncio

        try:
            await asyncio.wait_for(self._received.wait(), seconds)
        except asyncio.TimeoutError:
            return
        self._received.clear()

    def close(self) -> None:
        for signum in _SIGNALS:
            self._loop.remove_signal_handler(signum)


_SIGNALS: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)
