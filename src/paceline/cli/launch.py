"""Submits a job, runs it or prints its plan, for ``run``, ``train`` and ``evaluate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.batch import submit
from paceline.cli.dispatch import Dispatch, ssh_options
from paceline.cli.verb import NAMED_PATHS, say
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job
from paceline.spec.rundir import DEFAULT_PARENT
from paceline.spec.terminal import format_for, wrap

if TYPE_CHECKING:
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
    from paceline.cli.runs.run_end import run_to_end, suggest_node_range

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
