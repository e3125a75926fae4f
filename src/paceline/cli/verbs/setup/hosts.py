"""``paceline setup hosts``: lines for /etc/hosts."""

from __future__ import annotations

import click

from paceline.cli.measure.survey import survey
from paceline.cli.verb import Verb, say
from paceline.cli.verbs.setup.targets import cluster_hosts, host_options
from paceline.setup import lines


@click.command("hosts", cls=Verb)
@host_options
@click.pass_context
def command(ctx: click.Context, /, **_: object) -> None:
    """Print lines for /etc/hosts, and errors in the existing lines. Change nothing."""
    results = survey(ctx, cluster_hosts(ctx)[0], "quick")
    addresses = {name: results.address(name) for name in results.names}
    say("# the same lines for /etc/hosts of every host:")
    say("\n".join(lines.hosts_lines(addresses, results.facts)))
    for name in results.names:
        for line in lines.loopback_lines(results.facts[name]):
            say(f"# on {name}, take the own name off line {line}")
