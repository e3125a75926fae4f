"""Commands that a batch system runs later: the script, its submission, and following it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.applicability import SUBMISSION, VERBS, specified_options, spelling
from paceline.cli.verb import say
from paceline.schedulers.scheduler import Scheduler
from paceline.spec.errors import SettingError
from paceline.spec.job import Job

if TYPE_CHECKING:
    from paceline.schedulers.script import BatchRequest


def submit(ctx: click.Context, job: Job, directory: Path, scheduler: Scheduler,
           folder_option: str = "--run-dir") -> int:  # fmt: skip
    """Writes the script, and submits and follows it if possible; returns the exit status."""
    import asyncio
    import secrets

    from paceline.rendezvous.endpoint import KEY_VARIABLE, TOKEN_DIGITS
    from paceline.schedulers import submission

    directory = directory.absolute()
    request = batch_request(ctx, job, directory, folder_option)
    if scheduler.stores_secrets and not ctx.params["plan_only"]:
        key = secrets.token_hex(TOKEN_DIGITS // 2)  # of this run's rendezvous
        request = replace(request, secrets={KEY_VARIABLE: key, **job.environment.forwarded})
    text = scheduler.render(request)
    if ctx.params["plan_only"] or not scheduler.can_follow():
        click.echo(text, nl=False)
        if not scheduler.is_tested:
            instructions = (
                f"; submit it with {scheduler.submit_command}" if scheduler.submit_command else ""
            )
            if request.secrets:
                instructions += ", and show it to nobody: it holds secrets (--plan leaves them out)"
            say(
                f"paceline: this form was not tried on a real {scheduler.name}{instructions}",
                err=True,
            )
        return 0
    submitted = submission.submit_job(scheduler, text, directory, request.array, job.typed)
    say(f"paceline: {submitted.title}, run directory {directory}", err=True)
    if ctx.params["detach"]:
        return 0
    return asyncio.run(submission.follow(submitted, lambda line: say(line, err=True)))


def batch_request(
    ctx: click.Context, job: Job, directory: Path, folder_option: str
) -> BatchRequest:
    from paceline.schedulers.script import BatchRequest

    params = ctx.params
    if params["nnodes"] is None:
        raise SettingError("a batch needs the number of nodes", remedy="--nnodes N")
    texts: dict[str, Any] = {name: params[name] or "" for name in _TEXTS}
    return BatchRequest(
        name=job.name,
        python=job.python,
        verb=tuple(VERBS[ctx.command.name or "run"].split()),
        folder=folder_option,
        options=inner_arguments(ctx),
        workdir=job.workdir,
        run_dir=str(directory),
        nodes=params["nnodes"],
        processes=params["nproc_per_node"] if isinstance(params["nproc_per_node"], int) else None,
        time=params["time_limit"] or "",
        cpus_per_task=params["cpus_per_task"],
        arguments=tuple(params["sbatch_arg"]),
        setup=tuple(params["setup_command"]),
        requeue=params["requeue"],
        mounts=tuple(params["mount"]),
        shm_size=params["shm_size"] if "shm_size" in specified_options(ctx) else "",
        forwarded=tuple(job.environment.forwarded),
        **texts,
    )


# Options that are texts of the same names in the batch.
_TEXTS = ("partition", "account", "mem", "gres", "gpus", "gpus_per_node", "constraint", "array",
          "image")  # fmt: skip


def inner_arguments(ctx: click.Context) -> tuple[str, ...]:
    """Returns the job's own arguments, as the command inside the batch gets them.

    Written from the options' values, not from the typed words: a variable or a file of the
    launching machine may not be there when the batch runs.
    """
    spellings = specified_options(ctx, [param.name or "" for param in ctx.command.params])
    passed = spellings.keys() - SUBMISSION - _CONSUMED
    arguments: list[str] = []
    for param in sorted(ctx.command.params, key=lambda param: isinstance(param, click.Argument)):
        value = ctx.params.get(param.name or "")
        if isinstance(param, click.Argument):
            arguments += map(str, value if isinstance(value, tuple) else [value])
        elif isinstance(param, click.Option) and param.name in passed:
            flag = spelling(param, value)
            values = value if isinstance(value, tuple) else [value]
            arguments += [flag] if param.is_flag else [f"{flag}={item}" for item in values]
    return tuple(arguments)


# Options that the submission has used up, besides those that are for submissions only.
_CONSUMED = {"via", "nnodes", "run_dir", "out", "plan_only"}
