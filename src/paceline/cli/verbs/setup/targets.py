"""The hosts that a part of ``paceline setup`` works on."""

from __future__ import annotations

import click

from paceline.cli.cluster import read_chosen_cluster
from paceline.cli.options import SETUP_HOSTS, SSH_CONFIG, settings_options
from paceline.cli.settings import setting
from paceline.remote.openssh import SshOptions
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host

host_options = settings_options(SETUP_HOSTS, SSH_CONFIG)


def cluster_hosts(ctx: click.Context) -> tuple[tuple[Host, ...], SshOptions]:
    """Returns the hosts and how to reach them; SettingError if only this machine is named."""
    inherit_options(ctx)
    cluster = read_chosen_cluster(ctx)
    if all(host.local for host in cluster.hosts):
        raise SettingError("setup needs hosts other than this machine", remedy="-H n1,n2 or a file")
    return cluster.hosts, SshOptions(ctx.params["ssh_config"])


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
