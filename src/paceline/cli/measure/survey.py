"""Surveys hosts with the interpreter and the interface of a verb's options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.dispatch import ssh_options
from paceline.remote import this_machine
from paceline.spec.hosts import Host

if TYPE_CHECKING:
    from paceline.checks.check import Level, Survey


def survey(ctx: click.Context, hosts: Sequence[Host], level: Level,
           only: Sequence[str] = ()) -> Survey:  # fmt: skip
    """Runs the checks of a level on hosts, or only some of them."""
    import asyncio

    from paceline.checks.check import Requirements
    from paceline.checks.runner import survey_hosts

    python = ctx.params.get("python") or this_machine.default_python()
    requirements = Requirements(
        pythons={host.name: host.python or python for host in hosts},
        workdirs={host.name: host.workdir or str(Path.cwd()) for host in hosts},
        interface=ctx.params.get("iface"),
    )
    ssh = ssh_options(ctx.params)
    return asyncio.run(survey_hosts(hosts, ssh, requirements, level, only=only))
