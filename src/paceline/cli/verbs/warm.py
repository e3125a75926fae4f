"""``paceline warm``: hosts that are ready for the next command before it is typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli import options
from paceline.cli.cluster import read_chosen_cluster
from paceline.cli.dispatch import ssh_options
from paceline.cli.job_options import activation_scripts, parse_env
from paceline.cli.settings import setting
from paceline.cli.verb import Verb, VerbGroup, say
from paceline.launch.planning.entry import entry_of, preload_of
from paceline.remote import this_machine
from paceline.schedulers import DEFAULT, load
from paceline.schedulers.scheduler import Options
from paceline.spec.errors import NodeError
from paceline.spec.formatting import format_time, pluralize, span
from paceline.spec.job import Entry, Environment, Job
from paceline.spec.terminal import format_for

if TYPE_CHECKING:
    from paceline.launch.warm import AgentStatus


_ONLY = click.option("-H", "--hosts", metavar="SOURCE", help="Only these hosts.",
                     show_default="all")  # fmt: skip


@click.group("warm", cls=VerbGroup)
def command() -> None:
    """Keep hosts ready for your next command, so that it starts at once.

    On each host, an agent waits with torch imported, and SSH keeps a connection open. Nobody else
    can use this agent. It ends by itself when no command has used it for the time that you gave
    with --for, or with --keep-warm of a run.
    """


@command.command("up", cls=Verb)
@options.settings_options(
    options.HOSTS, options.SSH_CONFIG, options.ACCEPT_NEW_HOST_KEYS, options.NPROC_PER_NODE,
    options.ENV, options.ACTIVATE, options.UNSET, options.PYTHON, options.NO_TORCH,
)  # fmt: skip
@click.option("--for", "seconds", type=options.Duration(1.0), default=600.0, metavar="DURATION",
              help="How long to wait after the last use: 90, 10m, 1h.",
              show_default="10m")  # fmt: skip
@click.argument("script", required=False)
@click.pass_context
def up(ctx: click.Context, /, script: str | None, no_torch: bool, seconds: float,
       **_: object) -> None:  # fmt: skip
    """Start an agent on every host; it waits for `paceline run` with the same options.

    With SCRIPT, the modules that it imports are imported, too. If your next command has another
    interpreter, environment or imports, it still works, but has to import again.
    """
    import asyncio

    from paceline.launch.launcher import request_of
    from paceline.launch.warm import make_ready

    cluster = read_chosen_cluster(ctx)
    entry = entry_of(script, ()) if script else Entry("script", "", ())
    public, forwarded = parse_env(ctx.params["env"])
    job = Job(
        name="warm",
        entry=entry,
        workdir=str(Path.cwd()),
        python=ctx.params["python"] or this_machine.default_python(),
        environment=Environment(public, forwarded, ctx.params["unset"], setting(ctx, "env").source),
        activate=activation_scripts(ctx),
        nproc_per_node=setting(ctx, "nproc_per_node"),
        preload=() if no_torch else preload_of(entry),
        needs_torch=not no_torch,
    )
    transport = load(DEFAULT).start(Options(ssh=ssh_options(ctx.params)))
    request = request_of(job, cluster, transport, keep_warm_s=seconds)
    missing = asyncio.run(make_ready(request))
    ready = [host.name for host in cluster.hosts if host.name not in missing]
    if ready:
        say(f"paceline: {pluralize(len(ready), 'host')} ready for {span(round(seconds))}"
            f" after each use: {', '.join(ready)}", err=True)  # fmt: skip
    if missing:
        raise NodeError(
            f"no agent can wait on {', '.join(missing)}",
            found="another command uses the one that waits there, or nothing can be kept: the cache"
            " folder here or there is full, or others can write to it",
            remedy="paceline warm status\n"
            "here and there: df -h ~/.cache; chmod go-w ~ ~/.cache ~/.cache/paceline",
        )


@command.command("down", cls=Verb)
@_ONLY
@click.pass_context
def down(ctx: click.Context, /, hosts: str | None) -> None:
    """End the waiting agents now."""
    seen = _read_agents(ctx, hosts, end=True)
    for agent in seen:
        outcome = {"waits": "ended", "gone": "had ended already"}.get(
            agent.state, "in use by a command"
        )
        say(format_for(f"{agent.record.host}  {outcome}", sys.stdout))
    if not seen:
        say("paceline: no host is kept ready", err=True)
    ctx.exit(1 if any(agent.state == "in use" for agent in seen) else 0)


@command.command("status", cls=Verb)
@_ONLY
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def status(ctx: click.Context, /, hosts: str | None, as_json: bool) -> None:
    """Show on which hosts an agent waits, and for how long."""
    seen = [agent for agent in _read_agents(ctx, hosts) if agent.state != "gone"]
    if as_json:
        click.echo(json.dumps([_agent_to_json(agent) for agent in seen], indent=2))
        return
    for agent in seen:
        say(format_for("  ".join(_describe_agent(agent)), sys.stdout))
    if not seen:
        say("paceline: no host is kept ready", err=True)


def _read_agents(ctx: click.Context, hosts: str | None, end: bool = False) -> Sequence[AgentStatus]:
    import asyncio

    from paceline.launch.warm import inspect_agents

    selected = read_chosen_cluster(ctx).hosts if hosts else ()
    return asyncio.run(inspect_agents(frozenset(host.name for host in selected), end))


def _describe_agent(agent: AgentStatus) -> list[str]:
    record, state = agent.record, "in use"
    if agent.state != "in use":
        state = f"ready until {format_time(record.until)} ({span(round(agent.remaining_s))})"
    return [record.host, state, record.imported, record.python]


def _agent_to_json(agent: AgentStatus) -> dict[str, object]:
    names = ("host", "address", "python", "imported", "until", "since", "seconds")
    fields = {name: value for name, value in asdict(agent.record).items() if name in names}
    return {**fields, "state": agent.state, "left_s": round(agent.remaining_s, 1)}
