"""``paceline hosts``: shows the hosts that a description names, and writes other dialects."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from paceline.cli.applicability import reject_combination
from paceline.cli.cluster import hosts_origin
from paceline.cli.options import HOSTS, SSH_CONFIG, settings_options
from paceline.cli.settings import setting, toml_of, use_lab
from paceline.cli.verb import Verb, say
from paceline.hosts import apply_overrides, lost_fields, read_hosts, write_hosts
from paceline.report.findings import aligned
from paceline.spec.errors import SettingError
from paceline.spec.formatting import pluralize
from paceline.spec.hosts import Cluster, Host
from paceline.spec.settings import Source
from paceline.spec.terminal import clean

_TITLES = {"identity_file": "key", "job_address": "job address", "local": "this machine"}
_MANDATORY = ("name", "slots")


@click.command("hosts", cls=Verb)
@settings_options(HOSTS, SSH_CONFIG)
@click.argument("source", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--write", "target", metavar="DIALECT", help="Print the hosts in another dialect.")
@click.option("--dialect", metavar="DIALECT",
              help="Read SOURCE as this dialect, without detection.")  # fmt: skip
@click.option("--colon", metavar="MEANING", help="What `host:n` means: slots, port, rendezvous.")
@click.pass_context
def command(
    ctx: click.Context, /, source: str | None, as_json: bool, target: str | None,
    dialect: str | None, colon: str | None, **_: object,
) -> None:  # fmt: skip
    """Show the hosts that SOURCE names, as paceline understands them.

    SOURCE is one of:

    \b
    FILE            a host file; its format (dialect) is detected
    DIALECT:FILE    a file in this dialect, such as ssh-config:~/.ssh/config
    n1,n2:4,me@n3   a list of hosts; also node[01-04]
    lab             the lab that is up (lab:NAME if there are several)
    slurm, pbs, mpi, torchrun, kubernetes
                    the hosts of this environment; auto tries them in turn
    local           this machine

    Without SOURCE, the command takes the hosts from the first of these that exists:
    PACELINE_OPT_HOSTS, [run] hosts of ./paceline.toml, the Slurm allocation in which it runs, the
    [hosts.NAME] tables of ./paceline.toml, this machine. These tables also override any other
    description of a host. No file is changed.

    Dialects: plain, slots (openmpi, deepspeed), colon (mpich, intel), port, tlt, list, slurm,
    pbs, ssh-config, accelerate, toml. Some can be read but not written: inventory (ansible, json,
    yaml), mpi, torchrun, kubernetes.
    """
    if target:
        reject_combination(ctx, "--write", ("as_json",))
    if source is not None:
        apply_source(ctx, source)
    source_text = None if dialect and source is None else ctx.params["hosts"]
    hosts = read_hosts(
        source_text, environ=os.environ, cwd=Path.cwd(), colon=colon, dialect=dialect
    )
    cluster = apply_overrides(hosts, toml_of(ctx))
    if source_text is not None and setting(ctx, "hosts").source is not Source.COMMAND_LINE:
        cluster = replace(cluster, source=hosts_origin(ctx, cluster))
    if target:
        _write(cluster, target)
    elif as_json:
        click.echo(json.dumps(to_json(cluster), indent=2))
    else:
        _show(cluster, ctx.params["ssh_config"])


def apply_source(ctx: click.Context, source: str) -> None:
    """Treats SOURCE as ``-H SOURCE``."""
    if setting(ctx, "hosts").source is Source.COMMAND_LINE:
        raise SettingError("SOURCE and -H cannot be combined", remedy=f"paceline hosts {source}")
    ctx.params["hosts"] = source
    ctx.set_parameter_source("hosts", ParameterSource.COMMANDLINE)
    use_lab(ctx)


def to_json(cluster: Cluster) -> dict[str, Any]:
    """Returns the object of ``--json``: every field of every host, ``null`` if unknown."""
    return {
        "source": cluster.source,
        "hosts": [asdict(host) for host in cluster.hosts],
        "notes": list(cluster.notes),
    }


def table(cluster: Cluster) -> tuple[list[str], list[list[str]]]:
    """Titles and rows as text: name and slots, and all that some host has."""
    names = [field.name for field in fields(Host) if field.name != "slots_yield"]
    names = [n for n in names if n in _MANDATORY or any(_cell(host, n) for host in cluster.hosts)]
    titles = [_TITLES.get(name, name) for name in names]
    return titles, [[_cell(host, name) or "-" for name in names] for host in cluster.hosts]


def _write(cluster: Cluster, target: str) -> None:
    click.echo(write_hosts(cluster, target), nl=False)
    for lost in lost_fields(cluster, target):
        say(f"paceline: {target} cannot say: {lost}", err=True)


def _show(cluster: Cluster, ssh_config: Path | None) -> None:
    titles, rows = table(cluster)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(*titles, box=None, pad_edge=False, header_style="bold")
        for row in rows:  # Text: square brackets in names are no markup
            drawn.add_row(*(Text(clean(cell)) for cell in row))
        Console().print(drawn)
    else:
        say("\n".join(aligned(titles, rows)))
    say(f"\n{_count(cluster)} from {cluster.source}")
    if ssh_config is not None:
        say(f"reached by the ssh config {ssh_config}")
    for note in cluster.notes:
        say(f"note: {note}")


def _count(cluster: Cluster) -> str:
    count = len(cluster.hosts)
    hosts = pluralize(count, "host")
    slots = [host.slots for host in cluster.hosts]
    numbers = [number for number in slots if number is not None]
    return f"{hosts}, {pluralize(sum(numbers), 'slot')}," if len(numbers) == count else hosts


def _cell(host: Host, field: str) -> str:
    value = getattr(host, field)
    if field == "address" and value == host.name:
        return ""
    if value is None or value is False:
        return ""
    if isinstance(value, Mapping):  # values may be long, and secret
        return ", ".join(value)
    return "yes" if value is True else str(value)
