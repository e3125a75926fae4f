"""``paceline status``: what has become of a run."""

from __future__ import annotations

import json
import sys

import click

from paceline.cli.flags import of_a_run
from paceline.cli.runs import RunState, current_run, look_at
from paceline.cli.verb import Verb, say
from paceline.spec.terminal import for_reader


@click.command("status", cls=Verb)
@of_a_run
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **_: object) -> None:
    """Say whether RUN is running, and how it ended.

    Without RUN: the one below runs/ that is running, else the newest there.

    A batch is described in its scheduler's own words.
    """
    state = look_at(current_run(ctx))
    if as_json:
        click.echo(json.dumps(state.to_json(), indent=2))
    else:
        say(for_reader(describe(state), sys.stdout))


def describe(state: RunState) -> str:
    """A few lines for people."""
    ended = f", exit status {state.exit_code}" if state.exit_code is not None else ""
    lines = [f"{state.path}: {state.word}{ended}"]
    if state.job:
        lines.append(f"  {state.job.title}")
    if state.owner and state.word == "running":
        owner = state.owner
        lines.append(
            f"  launcher: process {owner['pid']} on {owner['host']} since {owner['since']}"
        )
    if state.last:
        shown = ", ".join(
            f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in list(state.last.items())[:6]
        )
        lines.append(f"  last record: {shown}")
    if state.failure:
        lines.append(f"  failed first: {state.failure}")
    return "\n".join(lines)
