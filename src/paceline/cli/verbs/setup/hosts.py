"""``paceline setup hosts``: lines for /etc/hosts."""

from __future__ import annotations

import click

from paceline.cli.verb import Verb, say
from paceline.cli.verbs.setup.targets import host_options, survey_targets
from paceline.setup import lines


@click.command("hosts", cls=Verb)
@host_options
@click.pass_context
def command(ctx: click.Context, /, **_: object) -> None:
    """Print lines for /etc/hosts, and errors in the existing ones. Changes nothing."""
    survey = survey_targets(ctx)
    addresses = {name: survey.address(name) for name in survey.names}
    say("# the same lines for /etc/hosts of every host:")
    say("\n".join(lines.hosts_lines(addresses, survey.facts)))
    for name in survey.names:
        for line in lines.loopback_lines(survey.facts[name]):
            say(f"# on {name}, take the own name off line {line}")
