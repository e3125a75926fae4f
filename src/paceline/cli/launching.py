"""What ``run`` and ``train`` share: options, hosts, and the call of the launcher."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.cli.applies import refuse_ignored
from paceline.cli.settings import (
    check_environment,
    parse_env,
    read_settings_file,
    refuse_ours,
    setting,
    use_file,
    variable_of,
)
from paceline.cli.via import VIA_OPTIONS, Way, hosts_source, manner_of, way_of
from paceline.cluster import this_machine
from paceline.cluster.inventory import apply_overrides, find_me, read_hosts
from paceline.launch.transport import Transport
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Environment, Job
from paceline.spec.rundir import DEFAULT_PARENT

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = [
    click.option("-H", "--hosts", metavar="SOURCE", help="Host file, comma list, or slurm, pbs, …"
                 " (see `paceline hosts --help`). Default: this machine."),
    click.option("--ssh-config", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                 help="ssh config file to use instead of yours."),
    click.option("--accept-new-host-keys", is_flag=True,
                 help="Pin the keys of hosts met for the first time, and show them."),
    click.option("--nnodes", type=int, help="Use the first N hosts. Default: all."),
    click.option("-p", "--nproc-per-node", type=int,
                 help="Processes a node. Default: its slots, else one an accelerator, else 1."),
    click.option("--env", "env", multiple=True, metavar="NAME[=VALUE]",
                 help="Set a variable for every rank; without value, forward mine unrecorded."),
    click.option("--unset", multiple=True, metavar="NAME", help="Hide a variable from the ranks."),
    click.option("--iface", metavar="NAME", help="Network interface for the job's traffic."
                 " Default: found by trying, for each node by itself."),
    click.option("--python", metavar="PATH", help="Interpreter. Default: paceline's own."),
    click.option("--run-dir", type=click.Path(file_okay=False, path_type=Path),
                 help="The run's folder. Default: runs/NAME-DATE-TIME."),
    click.option("--name", help="Name of the run. Default: from the script."),
    click.option("--master-port", type=click.IntRange(0, 65535), default=0,
                 help="Port of the rendezvous store on the first host. Default: a free one, held."),
    click.option("--backend", type=click.Choice(["gloo", "nccl", "xccl", "mpi"]),
                 help="Refuse to start where torch lacks this backend."),
    click.option("--ship", type=click.Choice(["auto", "always", "never"]), default="auto",
                 help="Copy the code to hosts where it is missing or different."),
    click.option("--bind", type=click.Choice(["auto", "none"]), default="auto",
                 help="auto gives each rank of a CPU node its own share of the CPUs."),
    click.option("--lease", type=click.FloatRange(2.0), default=10.0, metavar="SECONDS",
                 help="A node that hears nothing of the launcher for this long ends the job."),
    click.option("--grace", type=click.FloatRange(0.0), default=8.0, metavar="SECONDS",
                 help="Time between TERM and KILL when you stop the job."),
    click.option("--max-restarts", type=click.IntRange(0), default=0,
                 help="After a failure start all nodes again, in step, up to N times."),
    click.option("--check", "check_level", type=click.Choice(["full", "quick", "none"]),
                 default="quick", help="What to check before the start: quick looks at what the"
                 " login brought, full is `paceline check`."),
    click.option("--show", type=click.Choice(["all", "rank0", "none"]), default="all",
                 help="Whose output is shown live. The logs are complete in any case."),
    click.option("--plan", "plan_only", is_flag=True,
                 help="Print what would run where, and stop."),
    click.option("--json", "as_json", is_flag=True, help="With --plan: print it as JSON."),
]  # fmt: skip


def launch_options(command: F) -> F:
    """Adds the common options to a verb."""
    for option in reversed([*_OPTIONS, *VIA_OPTIONS]):
        command = option(command)
    for made in command.__click_params__:  # type: ignore[attr-defined]
        own = [made.envvar] if made.envvar else []  # PACELINE_RDZV_ID is a name of its own
        made.envvar = [*own, variable_of(made)]
    return command


def read_cluster(source: str | None, toml: Mapping[str, Any], cwd: Path) -> Cluster:
    """The hosts, with what paceline.toml says of them; this machine is marked."""
    cluster = apply_overrides(read_hosts(source, environ=os.environ, cwd=cwd), toml)
    return mark_me(cluster)


def mark_me(cluster: Cluster) -> Cluster:
    """Marks the host that is this very machine: no SSH to oneself."""
    if any(host.local for host in cluster.hosts):
        return cluster
    me = find_me(cluster, own_names(), own_addresses())
    hosts = tuple(replace(host, local=host.name == me) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def own_names() -> set[str]:
    name = socket.gethostname()
    return {name, name.split(".")[0], "localhost"}


def own_addresses() -> set[str]:
    return {str(entry["address"]) for entry in this_machine.addresses()}


def job_of(ctx: click.Context, entry: Entry, name: str, **more: Any) -> Job:
    """The job that the options describe.

    Args:
        ctx: The verb's context, with the common options.
        entry: What every rank runs.
        name: The run's name unless the user gave one.
        more: Fields of the job that only this verb sets.
    """
    public, forwarded = parse_env(ctx.params["env"])
    for hidden in ctx.params["unset"]:
        refuse_ours("--unset", hidden)
    return Job(
        name=ctx.params["name"] or name,
        entry=entry,
        workdir=str(Path.cwd()),
        python=ctx.params["python"] or this_machine.default_python(image=ctx.params["image"]),
        environment=Environment(public, forwarded, ctx.params["unset"]),
        nproc_per_node=setting(ctx, "nproc_per_node"),
        nnodes=setting(ctx, "nnodes"),
        interface=setting(ctx, "iface"),
        master_port=setting(ctx, "master_port"),
        backend=ctx.params["backend"],
        ship=setting(ctx, "ship"),
        bind=setting(ctx, "bind"),
        lease_s=setting(ctx, "lease"),
        grace_s=setting(ctx, "grace"),
        max_restarts=setting(ctx, "max_restarts"),
        **more,
    )


def prepare(ctx: click.Context) -> tuple[Cluster, Way]:
    """Applies paceline.toml; reads the hosts and how they are started."""
    cwd = Path.cwd()
    toml = read_settings_file(cwd)
    use_file(ctx, toml)
    check_environment(ctx)
    refuse_ignored(ctx, manner_of(ctx.params, os.environ), os.environ)
    way = way_of(ctx.params)
    if way.name == "hand":
        return meeting_cluster(ctx.params["nnodes"]), way
    source = hosts_source(ctx.params, os.environ)
    return read_cluster(source if way.kind == "run" else None, toml, cwd), way


def meeting_cluster(nodes: int) -> Cluster:
    """Places for nodes that are not known before they come."""
    return Cluster(tuple(Host(f"node{place}") for place in range(nodes)), "--rdzv")


def launch(
    ctx: click.Context,
    job: Job,
    cluster: Cluster,
    way: Way,
    package: bool = False,
    parent: Path = Path(DEFAULT_PARENT),
    after: Callable[[Path], None] | None = None,
) -> int:
    """Runs the job, or prints its plan; returns the exit status.

    Args:
        ctx: The verb's context, with the common options.
        job, cluster, way: What, where, and how the nodes are started.
        package: Ship this installation's ``paceline`` to the nodes.
        parent: Folder of run directories when the user named none.
        after: Called with the run directory once the job has ended well.
    """
    if way.kind == "submit":
        from paceline.cli.batch import submit

        return submit(ctx, job, parent, way.name)
    if way.kind == "join":
        from paceline.cli.joining import join

        return join(ctx, job)
    assert way.transport is not None
    way.agree_on(job)
    if ctx.params["plan_only"]:
        return show_plan(
            job, cluster, way.transport, as_json=ctx.params["as_json"], package=package
        )
    from paceline.cli.preflight import explain_run, explained, inspector, preflight
    from paceline.launch.rundir import fresh_path
    from paceline.launch.running import report_failure, run_job
    from paceline.launch.screen import Screen

    preflight(ctx, job, cluster, way)
    run_dir = ctx.params["run_dir"] or fresh_path(parent, job.name)
    with explained(run_dir):
        outcome = run_job(
            job,
            cluster,
            way.transport,
            Screen(ctx.params["show"]),
            run_dir=run_dir,
            parent=parent,
            package=package,
            inspect=inspector(ctx, job, run_dir),
        )
    if text := report_failure(outcome):
        click.echo(text, err=True)
        explain_run(outcome.path, shown=outcome.result.failure is not None)
    elif after is not None:
        after(outcome.shown)
    return outcome.result.exit_code


def show_plan(job: Job, cluster: Cluster, transport: Transport, *, as_json: bool,
              package: bool) -> int:  # fmt: skip
    """Prints what would run where."""
    from paceline.launch.running import make_plan
    from paceline.launch.showing import describe

    plan = make_plan(job, cluster, transport, package)
    click.echo(json.dumps(plan.to_json(), indent=2) if as_json else describe(plan))
    return 0
