"""What ``run`` and ``train`` share: options, hosts, and the call of the launcher."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paceline.cli import trust
from paceline.cli.applies import refuse_ignored
from paceline.cli.flags import LAUNCH, with_settings
from paceline.cli.sources import parse_env, refuse_ours, setting, toml_of
from paceline.cli.torchrun import torchrun_options
from paceline.cli.verb import TABLES_ARE_HOSTS, say
from paceline.cli.via import VIA_OPTIONS, Via, hosts_source, manner_of, submit, via_of
from paceline.schedulers import inside
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Environment, Job
from paceline.spec.rundir import DEFAULT_PARENT
from paceline.spec.settings import TOML_NAME, Setting, Source

if TYPE_CHECKING:
    from paceline.launch.prepare import Inspect
    from paceline.remote.transport import Transport

F = TypeVar("F", bound=Callable[..., Any])


def launch_options(command: F) -> F:
    """Adds the common options to a verb."""
    return torchrun_options(with_settings(command, [*LAUNCH, *VIA_OPTIONS]))


def read_cluster(ctx: click.Context, source: str | None) -> Cluster:
    """The hosts, with what paceline.toml says of them; this machine is marked.

    Args:
        ctx: The verb's context, with its settings.
        source: Where the hosts are described: ``hosts`` of the settings, or what stands for it.
    """
    from paceline.hosts import apply_overrides, read_hosts
    from paceline.hosts.lab import lab_name

    cwd, toml = Path.cwd(), toml_of(ctx)
    cluster = mark_me(apply_overrides(read_hosts(source, environ=os.environ, cwd=cwd), toml))
    if any(host.python or host.env for host in cluster.hosts) and lab_name(source or "") is None:
        from_file = setting(ctx, "hosts").source is Source.FILE
        trust.require_hosts(cwd / TOML_NAME, toml, described=from_file)
    return cluster


def chosen_hosts(ctx: click.Context) -> Cluster:
    """The hosts that the settings name, and where they were named, said on standard error."""
    cluster = read_cluster(ctx, ctx.params["hosts"])
    say_hosts(ctx, cluster)
    return cluster


def say_hosts(ctx: click.Context, cluster: Cluster) -> None:
    """Names hosts that were not typed with the command, and where they come from."""
    source = setting(ctx, "hosts").source
    if source is not Source.COMMAND_LINE and not all(host.local for host in cluster.hosts):
        say(f"paceline: hosts: {named(cluster)} ({origin(ctx, cluster)})", err=True)


def described_by(ctx: click.Context) -> Setting[str | None]:
    """The setting that names the hosts, in the words of a plan."""
    found = setting(ctx, "hosts")
    if found.value is None:
        where = "--rdzv" if ctx.params["rdzv"] else ""
        chosen = where or ("the allocation" if inside(os.environ) else "this machine")
        return Setting(None, Source.FOUND, chosen)
    where = {Source.COMMAND_LINE: f"-H {found.value}"}.get(found.source, found.detail)
    tables = found.value == TABLES_ARE_HOSTS
    return Setting(found.value, found.source, f"[hosts] of {where}" if tables else where)


def named(cluster: Cluster, most: int = 6) -> str:
    """The hosts' names, the middle of a long list left out."""
    names = [host.name for host in cluster.hosts]
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 2])}, … {names[-1]}: {len(names)} hosts"


def origin(ctx: click.Context, cluster: Cluster) -> str:
    """Where the hosts come from: which setting, and what that names unless it lists them."""
    found = setting(ctx, "hosts")
    if found.value is None or found.source is Source.DEFAULT:
        return cluster.source
    where = found.detail or found.source.label
    if found.value == TABLES_ARE_HOSTS:
        return f"[hosts] of {where}"
    listed = "," in found.value or len(cluster.hosts) == 1
    return where if listed else f"{where}: {found.value}"


def mark_me(cluster: Cluster) -> Cluster:
    """Marks the host that is this very machine: no SSH to oneself."""
    if any(host.local for host in cluster.hosts):
        return cluster
    from paceline.hosts import find_me

    me = find_me(cluster, own_names(), own_addresses())
    hosts = tuple(replace(host, local=host.name == me) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def own_names() -> set[str]:
    name = socket.gethostname()
    return {name, name.split(".")[0], "localhost"}


def own_addresses() -> set[str]:
    from paceline.remote import this_machine

    return {str(entry["address"]) for entry in this_machine.addresses()}


def job_of(ctx: click.Context, entry: Entry, name: str, **more: Any) -> Job:
    """The job that the options describe.

    Args:
        ctx: The verb's context, with the common options.
        entry: What every rank runs.
        name: The run's name unless the user gave one.
        more: Fields of the job that only this verb sets.
    """
    from paceline.remote import this_machine

    public, forwarded = parse_env(ctx.params["env"])
    for hidden in ctx.params["unset"]:
        refuse_ours("--unset", hidden)
    return Job(
        name=ctx.params["name"] or name,
        entry=entry,
        workdir=str(Path.cwd()),
        python=ctx.params["python"] or this_machine.default_python(image=ctx.params["image"]),
        environment=Environment(public, forwarded, ctx.params["unset"], setting(ctx, "env").source),
        nproc_per_node=setting(ctx, "nproc_per_node"),
        nnodes=setting(ctx, "nnodes"),
        hosts=described_by(ctx),
        interface=setting(ctx, "iface"),
        master_port=setting(ctx, "master_port"),
        backend=ctx.params["backend"],
        ship=setting(ctx, "ship"),
        bind=setting(ctx, "bind"),
        debug=setting(ctx, "debug"),
        lease_s=setting(ctx, "lease"),
        grace_s=setting(ctx, "grace"),
        hang_timeout_s=setting(ctx, "hang_timeout"),
        max_restarts=setting(ctx, "max_restarts"),
        **more,
    )


def prepare(ctx: click.Context) -> tuple[Cluster, Via]:
    """Reads the hosts and how they are started."""
    refuse_ignored(ctx, manner_of(ctx.params, os.environ), os.environ)
    via = via_of(ctx.params)
    if via.name == "rdzv":
        return unknown_nodes(ctx.params["nnodes"]), via
    if via.kind != "run":
        return read_cluster(ctx, None), via
    cluster = read_cluster(ctx, hosts_source(ctx.params, os.environ))
    say_hosts(ctx, cluster)
    return cluster, via


def unknown_nodes(nodes: int) -> Cluster:
    """Places for nodes that are not known before they come."""
    return Cluster(tuple(Host(f"node{place}") for place in range(nodes)), "--rdzv")


def launch(
    ctx: click.Context,
    job: Job,
    cluster: Cluster,
    via: Via,
    package: bool = False,
    parent: Path = Path(DEFAULT_PARENT),
    after: Callable[[Path], None] | None = None,
) -> int:
    """Runs the job, or prints its plan; returns the exit status.

    Args:
        ctx: The verb's context, with the common options.
        job, cluster, via: What, where, and how the nodes are started.
        package: Ship this installation's ``paceline`` to the nodes.
        parent: Folder of run directories when the user named none.
        after: Called with the run directory once the job has ended well.
    """
    if via.kind == "submit":
        from paceline.rundir.directory import fresh_path

        directory = ctx.params["run_dir"] or fresh_path(parent, job.name)
        return submit(ctx, job, directory, via.scheduler)
    if via.kind == "join":
        from paceline.launch.view import entry_argv
        from paceline.rendezvous.typed import serve

        assert via.endpoint is not None
        return serve(via.endpoint, entry_argv(job.entry, "python"), job.python)
    assert via.transport is not None
    via.agree_on(job)
    from paceline.cli.preflight import explain_run, explained, inspector, preflight, tell_libraries

    if ctx.params["plan_only"]:
        return show_plan(
            job,
            cluster,
            via.transport,
            as_json=ctx.params["as_json"],
            verbose=ctx.params["verbose"],
            package=package,
            inspect=inspector(ctx, job),
        )
    from paceline.launch.launcher import run_job, secrets_of
    from paceline.launch.screen import Screen
    from paceline.launch.summary import report_failure, report_success
    from paceline.rundir.directory import fresh_path
    from paceline.spec.terminal import clean

    preflight(ctx, job, cluster, via)
    run_dir = ctx.params["run_dir"] or fresh_path(parent, job.name)
    with explained(run_dir, secrets_of(job, cluster)):
        outcome = run_job(
            job,
            cluster,
            via.transport,
            Screen(ctx.params["show"]),
            run_dir=run_dir,
            parent=parent,
            package=package,
            inspect=inspector(ctx, job, run_dir),
        )
    if job.debug.value:
        tell_libraries(outcome.path)
    if text := report_failure(outcome):
        say(clean(text), err=True)
        shown = outcome.result.failure is not None
        explain_run(outcome.path, outcome.result, outcome.events, shown)
    elif after is not None:
        after(outcome.shown)
    else:
        say(report_success(outcome), err=True)
    return outcome.result.exit_code


def show_plan(job: Job, cluster: Cluster, transport: Transport, *, as_json: bool,
              verbose: bool, package: bool, inspect: Inspect | None) -> int:  # fmt: skip
    """Prints the plan that a run would execute."""
    from paceline.launch.launcher import plan_job
    from paceline.launch.view import describe, everything

    plan = plan_job(job, cluster, transport, package, inspect)
    if as_json:
        click.echo(json.dumps(plan.to_json(), indent=2))
    else:
        say(everything(plan) if verbose else describe(plan))
    return 0
