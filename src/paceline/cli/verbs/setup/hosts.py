"""``paceline setup hosts``: lines for /etc/hosts."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.verb import Verb, say
from paceline.cli.verbs.setup.targets import cluster_hosts, host_options
from paceline.remote import this_machine
from paceline.setup import lines


@click.command("hosts", cls=Verb)
@host_options
@click.pass_context
def command(ctx: click.Context, /, **_: object) -> None:
    """Print lines for /etc/hosts, and errors in the existing ones. Changes nothing."""
    import asyncio

    from paceline.checks.check import Requirements
    from paceline.checks.runner import survey_hosts

    hosts, ssh = cluster_hosts(ctx)
    pythons = {host.name: host.python or this_machine.default_python() for host in hosts}
    requirements = Requirements(pythons, dict.fromkeys(pythons, str(Path.cwd())))
    survey = asyncio.run(survey_hosts(hosts, ssh, requirements, "quick"))
    addresses = {name: survey.address(name) for name in survey.names}
    say("# the same lines for /etc/hosts of every host:")
    say("\n".join(lines.hosts_lines(addresses, survey.facts)))
    for name in survey.names:
        for line in lines.loopback_lines(survey.facts[name]):
            say(f"# on {name}, take the own name off line {line}")
