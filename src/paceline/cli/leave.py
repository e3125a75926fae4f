"""``--detach`` and ``--keep``: the run goes on without this command, and this machine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from paceline.cli.applies import refuse_beside
from paceline.cli.runs import called
from paceline.cli.verb import say
from paceline.cli.via import ssh_of
from paceline.launch.decide import choose_hosts
from paceline.launch.leave import Leaving, Outcome, leave, supervisor_among
from paceline.launch.prepare import Package
from paceline.launch.screen import Screen
from paceline.remote.transport import Transport
from paceline.schedulers.container import ContainerTransport
from paceline.spec.command import shell_text
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job


def leave_run(ctx: click.Context, job: Job, cluster: Cluster, transport: Transport,
              package: Package, run_dir: Path) -> int:  # fmt: skip
    """Starts the run, says how to come back, and returns; with --keep, comes back at once.

    Returns:
        The exit status: of the run, where it is over by then or was kept to its end, else 0.
    """
    leaving = Leaving(
        job, cluster, transport, package, ctx.params["supervisor"], run_dir.absolute(),
        ("paceline", *sys.argv[1:]),
        {name: ctx.params[name] for name in ("show", "check_level", "keep_results")},
        ssh_of(ctx.params),
        transport if isinstance(transport, ContainerTransport) else None,
    )  # fmt: skip
    hosts = choose_hosts(job, cluster)
    if supervisor_among(hosts, leaving.supervisor).local:
        typed = ctx.get_parameter_source("keep_results") is ParameterSource.COMMANDLINE
        if typed:
            refuse_beside(ctx, "a supervisor on this machine, whose results are in the run's"
                          " folder at once", ["keep_results"])  # fmt: skip
        leaving = dataclasses.replace(leaving, job=lasting(job, run_dir.absolute()))
    screen = Screen(ctx.params["show"])
    try:
        outcome = leave(leaving, screen)
    finally:
        screen.close()
    if outcome.exit_code is not None:
        return outcome.exit_code
    if ctx.params["keep"]:
        from paceline.cli.attach import attach_to

        return attach_to(run_dir, lines=ctx.params["screen"] == "lines")
    say(goes_on(outcome, run_dir), err=True)
    return 0


def lasting(job: Job, run_dir: Path) -> Job:
    """The job with folders of links to files in its run directory, where they outlive us."""
    from paceline.cli.train import GATHERED

    for number, one in enumerate(job.inputs):
        made = Path(one.path)
        if not made.name.startswith(GATHERED):
            continue
        kept = run_dir / f"input{number}"
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        for link in made.iterdir():
            (kept / link.name).unlink(missing_ok=True)
            (kept / link.name).symlink_to(link.readlink())
        args = tuple(f"{kept}" if arg == one.path else arg for arg in job.entry.args)
        inputs = tuple(
            dataclasses.replace(each, path=f"{kept}") if each is one else each
            for each in job.inputs
        )
        job = dataclasses.replace(
            job, entry=dataclasses.replace(job.entry, args=args), inputs=inputs
        )
    return job


def goes_on(outcome: Outcome, run_dir: Path) -> str:
    """Where the run goes on, and what is typed to come back to it."""
    run = shell_text([called(run_dir)])
    where = "this machine" if outcome.local else outcome.host.name
    return "\n".join([
        f"paceline: the run goes on without this command, supervised on {where}",
        f"  come back:  paceline attach {run}",
        f"  look:       paceline status {run}",
        f"              paceline logs -f {run}",
        f"  end it:     paceline stop {run}",
    ])  # fmt: skip
