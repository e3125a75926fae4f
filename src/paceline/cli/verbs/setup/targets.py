"""The hosts that a part of ``paceline setup`` works on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.cluster import read_chosen_cluster
from paceline.cli.options import SETUP_HOSTS, SSH_CONFIG, settings_options
from paceline.cli.settings import setting
from paceline.remote import this_machine
from paceline.remote.openssh import SshOptions
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

if TYPE_CHECKING:
    from paceline.checks.check import Survey

host_options = settings_options(SETUP_HOSTS, SSH_CONFIG)


def cluster_hosts(ctx: click.Context) -> tuple[tuple[Host, ...], SshOptions]:
    """Returns the hosts and how to reach them; SettingError if only this machine is named."""
    inherit_options(ctx)
    cluster = read_chosen_cluster(ctx)
    if all(host.local for host in cluster.hosts):
        raise SettingError("setup needs hosts other than this machine", remedy="-H n1,n2 or a file")
    return cluster.hosts, SshOptions(ctx.params["ssh_config"])


def survey_targets(ctx: click.Context) -> Survey:
    """Runs the quick checks on the hosts, for the interface of the options if there is one."""
    import asyncio

    from paceline.checks.check import Requirements
    from paceline.checks.runner import survey_hosts

    hosts, ssh = cluster_hosts(ctx)
    pythons = {host.name: host.python or this_machine.default_python() for host in hosts}
    workdirs = dict.fromkeys(pythons, str(Path.cwd()))
    requirements = Requirements(pythons, workdirs, interface=ctx.params.get("iface"))
    return asyncio.run(survey_hosts(hosts, ssh, requirements, "quick"))


def inherit_options(ctx: click.Context) -> None:
    """Options typed before the name of the part count as if they stood behind it."""
    parent = ctx.parent
    for name in ("hosts", "ssh_config"):
        if parent is None or parent.params.get(name) is None:
            continue
        if setting(parent, name).source > setting(ctx, name).source:
            ctx.params[name] = parent.params[name]
            source = parent.get_parameter_source(name)
            assert source is not None
            ctx.set_parameter_source(name, source)
