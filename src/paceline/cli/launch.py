"""Runs a job or prints its plan, for ``run``, ``train`` and ``evaluate``, and for supervisors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.batch import submit
from paceline.cli.dispatch import Dispatch, ssh_options
from paceline.cli.verb import NAMED_PATHS, say
from paceline.spec.errors import ConnectError, PacelineError
from paceline.spec.failure import LAUNCHER_HOST, Failure, Result
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job, NodeRange
from paceline.spec.rundir import DEFAULT_PARENT, PLAN
from paceline.spec.terminal import format_for, wrap

if TYPE_CHECKING:
    from paceline.launch.launcher import Takeover
    from paceline.launch.planning.request import Package
    from paceline.launch.results.run_outcome import RunOutcome
    from paceline.launch.terminal.screen import Screen
    from paceline.remote.transport import Transport
    from paceline.spec.hosts import Inspect


def launch_job(
    ctx: click.Context,
    job: Job,
    cluster: Cluster,
    dispatch: Dispatch,
    package: bool = False,
    parent: Path = Path(DEFAULT_PARENT),
    on_success: Callable[[Path], None] | None = None,
) -> int:
    """Runs the job, or prints its plan; returns the exit status.

    Args:
        package: Ship this installation's ``paceline`` to the nodes.
        parent: Folder of run directories when the user named none.
        on_success: Called with the run directory once the job has ended well.
    """
    from paceline.rundir import named_paths
    from paceline.rundir.directory import claimed, fresh_path, require_usable

    if dispatch.kind == "submit":
        directory = ctx.params["run_dir"] or fresh_path(parent, job.name)
        return submit(ctx, job, directory, dispatch.scheduler)
    if dispatch.kind == "join":
        from paceline.launch.planning.entry import entry_argv
        from paceline.rendezvous.manual import serve

        assert dispatch.endpoint is not None
        command = entry_argv(job.entry, "python")
        return serve(dispatch.endpoint, command, job.python, job.encrypt.value)
    assert dispatch.transport is not None
    if ctx.params.get("fastest"):
        from paceline.bench.saved_forecasts import choose_fastest

        cluster, reason = choose_fastest(job, cluster, ctx.params["run_dir"] or parent / job.name)
        say(wrap(f"paceline: {reason}", 80), err=True)
    dispatch.agree_on(job)
    run_dir = None
    if not ctx.params["plan_only"]:
        run_dir = ctx.params["run_dir"] or ctx.with_resource(claimed(parent, job.name))
        require_usable(run_dir)
    inspect = make_inspect(ctx, job, cluster, dispatch, run_dir)
    if run_dir is None:
        with suggest_node_range(job, cluster):
            return show_plan(ctx, job, cluster, dispatch.transport, package, inspect)
    named_paths.record(run_dir, ctx.meta.get(NAMED_PATHS, ()))
    if ctx.params["detach"] or ctx.params["keep"]:
        from paceline.cli.runs.leave import start_detached

        return start_detached(ctx, job, cluster, dispatch.transport, package, run_dir)
    from paceline.launch.terminal.screen import Screen

    screen = Screen(ctx.params["show"], display=ctx.params["screen"])
    return run_to_end(job, cluster, dispatch.transport, screen, run_dir=run_dir, parent=parent,
                     package=package, inspect=inspect, on_success=on_success,
                     keep_warm_s=ctx.params["keep_warm"],
                     is_generated=ctx.params["run_dir"] is None)  # fmt: skip


def make_inspect(ctx: click.Context, job: Job, cluster: Cluster, dispatch: Dispatch,
               run_dir: Path | None) -> Inspect | None:  # fmt: skip
    """Runs the checks that precede a run, not a plan; returns those for connected nodes."""
    level = ctx.params["check_level"]
    if level == "none":
        return None
    from paceline.checks.preflight import inspector, preflight

    links: Sequence[dict[str, Any]] = ()
    if level == "full" and run_dir is not None and dispatch.scheduler.is_direct:
        warnings, links = preflight(job, cluster, ssh_options(ctx.params))
        for warning in warnings:
            say(format_for(f"paceline: warning: {warning}", sys.stderr), err=True)
    return inspector(job, run_dir, links)


def show_plan(ctx: click.Context, job: Job, cluster: Cluster, transport: Transport,
              package: bool, inspect: Inspect | None) -> int:  # fmt: skip
    from paceline.launch.launcher import plan_job
    from paceline.launch.planning.plan_text import describe, describe_full

    plan = plan_job(job, cluster, transport, package, inspect)
    if ctx.params["as_json"]:
        click.echo(json.dumps(plan.to_json(), indent=2))
    elif ctx.params["verbose"]:
        say(describe_full(plan))
    else:
        hint = "All variables and the command of every rank: --plan -v, or --plan --json"
        say(f"{describe(plan)}\n{hint}")
    return 0


def run_to_end(
    job: Job,
    cluster: Cluster,
    transport: Transport,
    screen: Screen,
    *,
    run_dir: Path,
    parent: Path,
    package: Package,
    inspect: Inspect | None,
    on_success: Callable[[Path], None] | None = None,
    keep_warm_s: float = 0.0,
    detached: Takeover | None = None,
    is_generated: bool = False,
) -> int:
    """Runs a job and says how it ended; returns its exit status.

    Args:
        on_success: Called with the run directory once the job has ended well.
        is_generated: The run directory has a generated name; it is removed when the job is refused
            before there is a plan.
    """
    from paceline.cli.runs.run_end import report_end, report_run
    from paceline.launch.launcher import run_job, secrets_of
    from paceline.schedulers.submission import submitting_arguments

    secrets = secrets_of(job, cluster)
    with notify_on_end(job, run_dir.absolute(), secrets, screen) as end:
        with (
            record_refusal(job, run_dir, secrets, is_generated=is_generated),
            suggest_node_range(job, cluster),
        ):
            outcome = run_job(job, cluster, transport, screen, run_dir=run_dir, parent=parent,
                              package=package, inspect=inspect, keep_warm_s=keep_warm_s,
                              takeover=detached)  # fmt: skip
        outcome = replace(outcome, command=submitting_arguments(outcome.path, os.environ))
        end.append(outcome)
        report_end(job, outcome, on_success)
        if outcome.result.exit_code == 0:
            from paceline.bench.saved_forecasts import compare_at_end

            if comparison := compare_at_end(outcome.path):
                say(comparison, err=True)
        if not outcome.is_refused:  # else the page is that of the earlier run
            report_run(job, outcome.path)
    return outcome.result.exit_code


@contextlib.contextmanager
def notify_on_end(job: Job, run_dir: Path, secrets: Sequence[str],
         screen: Screen) -> Iterator[list[RunOutcome]]:  # fmt: skip
    """Notifies those that ``--notify`` names of how a job ended, when all of its files are there.

    The caller puts the outcome into the list; without one the job was not started.
    """
    from paceline.launch import notify
    from paceline.rundir.records import recorded_cause

    start = time.monotonic()
    outcomes: list[RunOutcome] = []
    for warning in notify.missing_programs(job.notify):
        screen.note(warning)
    ended: notify.RunEnd | None = None
    try:
        yield outcomes
    except Exception as error:
        headline = f"internal error: {error!r}"
        result = Result(1, Failure("launcher", LAUNCHER_HOST, None, headline=headline))
        if isinstance(error, PacelineError):
            result = Result(error.exit_code, error=error.render())
        ended = notify.RunEnd(run_dir, job.name, result, time.monotonic() - start, secrets=secrets)
        raise
    finally:
        for outcome in outcomes:
            ended = notify.RunEnd(run_dir, job.name, outcome.result, outcome.seconds,
                                 outcome.metrics, outcome.resumable, secrets,
                                 recorded_cause(outcome.path))  # fmt: skip
        if ended is not None:
            notify.notify_all(job.notify, ended, screen.note)
            screen.close()


@contextlib.contextmanager
def suggest_node_range(job: Job, cluster: Cluster) -> Iterator[None]:
    """Adds to the remedy of a failed login how to start with the hosts that answered."""
    try:
        yield
    except ConnectError as error:
        nodes = job.nnodes.value
        if error.num_refusals and not isinstance(nodes, NodeRange):
            num_hosts = nodes or len(cluster.hosts)
            if (num_answers := num_hosts - error.num_refusals) > 0:
                error.remedy += (
                    f"\nOr start with the hosts that answer: --nnodes {num_answers}:{num_hosts}"
                )
        raise


@contextlib.contextmanager
def record_refusal(job: Job, run_dir: Path, secrets: Sequence[str], *,
                      is_generated: bool) -> Iterator[None]:  # fmt: skip
    """Records why a job could not be started, with a page; the caller shows the error."""
    from paceline.cli.runs.run_end import explain_run, report_run
    from paceline.launch.launcher import finished_result
    from paceline.rundir.directory import Redactor
    from paceline.rundir.ownership import read_owner

    try:
        yield
    except PacelineError as error:
        if read_owner(run_dir) is not None or finished_result(run_dir):  # of another run
            raise
        if is_generated and not (run_dir / PLAN).exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # other runs are in it
                run_dir.parent.rmdir()
        else:
            text = Redactor(secrets).text(error.render())
            explain_run(run_dir, Result(error.exit_code, error=text), (), is_shown=False)
            report_run(job, run_dir)
        raise
