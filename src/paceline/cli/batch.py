"""Batches: the script is written, submitted to Slurm and followed; others are only written."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from paceline.cli.applies import SUBMISSION, given
from paceline.cli.verb import say
from paceline.rundir import records
from paceline.rundir.directory import fresh_path
from paceline.schedulers.batch import BATCHES, BatchRequest, render
from paceline.schedulers.slurm import ask
from paceline.schedulers.slurm_batch import JobState, parse_job, parse_submitted
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.job import Job

BATCH_FILE = "batch.json"  # scheduler and job id, by which status, logs and stop find the job
LOOK_EVERY_S = 0.5
REQUEUED_AFTER = {"NODE_FAIL", "PREEMPTED"}  # Slurm may be about to requeue: look twice
# Options that the submission has used up, besides those that are for submissions only.
_USED = {"via", "nnodes", "run_dir", "plan_only"}


def submit(ctx: click.Context, job: Job, parent: Path, name: str = "slurm") -> int:
    """Writes the script; for Slurm submits and follows it. The exit status is the job's."""
    directory = (ctx.params["run_dir"] or fresh_path(parent, job.name)).absolute()
    request = request_of(ctx, job, directory)
    text = render(name, request)
    if ctx.params["plan_only"] or name != "slurm":
        click.echo(text, nl=False)
        if not BATCHES[name][2]:
            say(f"paceline: this form was not tried on a real {name}; submit it with "
                       f"{BATCHES[name][1]}", err=True)  # fmt: skip
        return 0
    number = _sbatch(text, directory)
    say(f"paceline: Slurm job {number}, run directory {directory}", err=True)
    if ctx.params["detach"]:
        return 0
    output = directory / f"slurm-{number}.out"
    return asyncio.run(follow(number, [] if request.array else [output]))


def request_of(ctx: click.Context, job: Job, directory: Path) -> BatchRequest:
    """The batch that the options describe."""
    params = ctx.params
    if params["nnodes"] is None:
        raise SettingError("a batch needs the number of nodes", remedy="--nnodes N")
    return BatchRequest(
        name=job.name,
        argv=(job.python, "-m", "paceline", ctx.info_name or "run"),
        words=inner_words(ctx),
        workdir=job.workdir,
        run_dir=str(directory),
        nodes=params["nnodes"],
        processes=params["nproc_per_node"] if isinstance(params["nproc_per_node"], int) else None,
        time=params["time_limit"] or "",
        partition=params["partition"] or "",
        account=params["account"] or "",
        mem=params["mem"] or "",
        gres=params["gres"] or "",
        cpus_per_task=params["cpus_per_task"],
        arguments=tuple(params["sbatch_arg"]),
        setup=tuple(params["setup_command"]),
        requeue=params["requeue"],
        array=params["array"] or "",
        image=params["image"] or "",
        shm_size=params["shm_size"] if "shm_size" in given(ctx) else "",
        forwarded=tuple(job.environment.forwarded),
    )


def inner_words(ctx: click.Context) -> tuple[str, ...]:
    """What was given for the job itself, as the command in the batch is told it.

    Written from the options' values, not from the words that were typed: a variable or a file of
    the launching machine may not be there when the batch runs.
    """
    asked = given(ctx, [param.name or "" for param in ctx.command.params])
    words: list[str] = []
    for option in ctx.command.params:
        name = option.name or ""
        if isinstance(option, click.Option) and name in asked.keys() - SUBMISSION - _USED:
            words += _as_flags(option, ctx.params[name])
    for argument in ctx.command.params:
        if isinstance(argument, click.Argument):
            value = ctx.params[argument.name or ""]
            words += map(str, value if isinstance(value, tuple) else [value])
    return tuple(words)


def _as_flags(option: click.Option, value: Any) -> list[str]:
    flag = max(option.opts, key=len)
    if option.is_flag:
        return [flag]
    return [f"{flag}={one}" for one in (value if option.multiple else [value])]


def _sbatch(text: str, directory: Path) -> str:
    """Submits; SettingError with sbatch's own words when it refuses."""
    if shutil.which("sbatch") is None:
        raise SettingError(
            "--via slurm needs sbatch",
            found="no sbatch on PATH, and no Slurm allocation here",
            remedy="Type this on a login node of the cluster, or module load slurm",
        )
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "job.sbatch"
    script.write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SettingError(
            "Slurm refused the batch", found=done.stderr.strip() or done.stdout.strip(),
            remedy=f"Look at its directives: {script}", exit_code=1,
        )  # fmt: skip
    number = parse_submitted(done.stdout)
    record = {"scheduler": "slurm", "job": number, "output": f"slurm-{number}.out"}
    (directory / BATCH_FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")
    return number


# --- following ----------------------------------------------------------------------------------


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


async def follow(number: str, outputs: Sequence[Path], cancel: bool = True) -> int:
    """Shows a job's output and Slurm's words for its state until it is over.

    Args:
        number: The job's id.
        outputs: Its output files.
        cancel: Ctrl-C cancels the job; else it only ends the following.

    Returns:
        The job's exit status.
    """
    tails = [Tail(path) for path in outputs]
    stop = Stopper(number, cancel)
    last = seen = ""
    try:
        while True:
            state = await state_of(number)
            for tail in tails:
                tail.show()
            if state is None:
                raise _unknown(number)
            if state.describe() != last and state.word != "COMPLETING":
                last = state.describe()
                say(f"paceline: Slurm job {number}: {last}", err=True)
            passing = state.word in REQUEUED_AFTER and seen != state.word
            if (state.over and not passing) or stop.left:
                return stop.exit_code or state.exit_code
            seen = state.word
            await stop.wait(LOOK_EVERY_S)
    finally:
        stop.close()
        for tail in tails:
            tail.show()
            tail.close()


async def state_of(number: str) -> JobState | None:
    """Slurm's view of a job; of an array, of its first task."""
    said = await ask("scontrol", "show", "job", "-o", number)
    return parse_job(said.splitlines()[0]) if said.strip() else None


def _unknown(number: str) -> ConnectError:
    return ConnectError(
        f"Slurm does not know job {number} (any more)",
        found="scontrol show job said nothing",
        remedy=f"sacct -j {number}",
    )


class Stopper:
    """Ctrl-C while following: once cancels the job, twice kills it."""

    def __init__(self, number: str, cancel: bool) -> None:
        self.exit_code = 0
        self.left = False
        self._number = number
        self._cancel = cancel
        self._received = asyncio.Event()
        for one in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(one, self._take, one)

    def _take(self, signum: int) -> None:
        again = self.exit_code != 0
        self.exit_code = 128 + signum
        self.left = not self._cancel
        self._received.set()
        if self._cancel:
            cancel(self._number, kill=again)

    async def wait(self, seconds: float) -> None:
        """Sleeps, or until the next signal."""
        try:
            await asyncio.wait_for(self._received.wait(), seconds)
        except asyncio.TimeoutError:
            return
        self._received.clear()

    def close(self) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(one)


def cancel(number: str, kill: bool = False) -> None:
    """Asks Slurm to end a job. Cancelling a job that is over is no error."""
    force = ["--signal=KILL", "--full"] if kill else []
    subprocess.run(["scancel", *force, number], capture_output=True, check=False)


def record_of(directory: Path) -> dict[str, Any] | None:
    """Which batch a run directory belongs to, if to one."""
    record = records.read_object(directory / BATCH_FILE) or {}
    number = str(record.get("job", ""))[:40]
    return {**record, "job": number} if re.fullmatch(r"[0-9][0-9._+\[\]-]*", number) else None
