"""``--detach`` and ``--keep``: the run goes on without this command, and this machine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from paceline.cli.applicability import reject_combination
from paceline.cli.dispatch import ssh_options
from paceline.cli.runs.run_lookup import short_name
from paceline.cli.verb import say
from paceline.launch.leave import DetachedRun, DetachOutcome, detach, supervisor_among
from paceline.launch.planning.planner import choose_hosts
from paceline.launch.planning.request import Package
from paceline.launch.terminal.screen import Screen
from paceline.remote.transport import Transport
from paceline.schedulers.container import ContainerTransport
from paceline.spec.formatting import shell_text
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job


def start_detached(ctx: click.Context, job: Job, cluster: Cluster, transport: Transport,
              package: Package, run_dir: Path) -> int:  # fmt: skip
    """Starts the run and says how to come back; with --keep, attaches to it. Returns the status."""
    request = DetachedRun(
        job, cluster, transport, package, ctx.params["supervisor"], run_dir.absolute(),
        ("paceline", *sys.argv[1:]),
        {name: ctx.params[name] for name in ("show", "check_level", "keep_results")},
        ssh_options(ctx.params),
        transport if isinstance(transport, ContainerTransport) else None,
    )  # fmt: skip
    hosts = choose_hosts(job, cluster)
    if supervisor_among(hosts, request.supervisor).local:
        is_typed = ctx.get_parameter_source("keep_results") is ParameterSource.COMMANDLINE
        if is_typed:
            reject_combination(ctx, "a supervisor on this machine, whose results are in the run's"
                          " folder at once", ["keep_results"])  # fmt: skip
        request = dataclasses.replace(request, job=with_lasting_inputs(job, run_dir.absolute()))
    screen = Screen(ctx.params["show"])
    try:
        outcome = detach(request, screen)
    finally:
        screen.close()
    if outcome.exit_code is not None:
        if job.report:
            from paceline.report.writer import write_at_end

            write_at_end(run_dir)  # the supervisor has already named it
        return outcome.exit_code
    if ctx.params["keep"]:
        from paceline.cli.runs.attached import attach_to_run

        return attach_to_run(run_dir, lines=ctx.params["screen"] == "lines")
    say(describe_commands(outcome, run_dir), err=True)
    return 0


def with_lasting_inputs(job: Job, run_dir: Path) -> Job:
    """Returns the job with folders of links moved to the run directory, where they outlive us."""
    from paceline.cli.recipe_job import GATHERED_PREFIX

    for number, item in enumerate(job.inputs):
        folder = Path(item.path)
        if not folder.name.startswith(GATHERED_PREFIX):
            continue
        copy = run_dir / f"input{number}"
        copy.mkdir(mode=0o700, parents=True, exist_ok=True)
        for link in folder.iterdir():
            (copy / link.name).unlink(missing_ok=True)
            (copy / link.name).symlink_to(link.readlink())
        args = tuple(f"{copy}" if arg == item.path else arg for arg in job.entry.args)
        inputs = tuple(
            dataclasses.replace(other, path=f"{copy}") if other is item else other
            for other in job.inputs
        )
        job = dataclasses.replace(
            job, entry=dataclasses.replace(job.entry, args=args), inputs=inputs
        )
    return job


def describe_commands(outcome: DetachOutcome, run_dir: Path) -> str:
    """Describes where the run goes on, and which commands follow it."""
    run = shell_text([short_name(run_dir)])
    supervisor = "this machine" if outcome.host.local else outcome.host.name
    return "\n".join([
        f"paceline: the run continues without this command, supervised on {supervisor}",
        f"  attach:     paceline attach {run}",
        f"  status:     paceline status {run}",
        f"  logs:       paceline logs -f {run}",
        f"  stop:       paceline stop {run}",
    ])  # fmt: skip
