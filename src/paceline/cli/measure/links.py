"""Surveys the links between hosts, for the verbs that compare other rates with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.dispatch import ssh_options
from paceline.remote import this_machine
from paceline.spec.hosts import Host

if TYPE_CHECKING:
    from paceline.checks.check import Survey


def survey_links(ctx: click.Context, hosts: Sequence[Host]) -> Survey:
    """Runs the checks of ports and links on hosts, with the interpreter of the options."""
    import asyncio

    from paceline.checks.check import Requirements
    from paceline.checks.runner import survey_hosts

    python = ctx.params["python"] or this_machine.default_python()
    requirements = Requirements(
        pythons={host.name: host.python or python for host in hosts},
        workdirs={host.name: host.workdir or str(Path.cwd()) for host in hosts},
        interface=ctx.params["iface"],
    )
    ssh = ssh_options(ctx.params)
    return asyncio.run(survey_hosts(hosts, ssh, requirements, "full", only=("ports", "link")))
