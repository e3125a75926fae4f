"""``paceline status``: the state of a run."""

from __future__ import annotations

import json
import sys

import click

from paceline.cli.options import run_lookup_options
from paceline.cli.runs.describe import describe_run
from paceline.cli.runs.state import read_state_and_replicas
from paceline.cli.verb import Verb, say
from paceline.spec.errors import ConnectError, PacelineError
from paceline.spec.terminal import format_for


@click.command("status", cls=Verb)
@run_lookup_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **_: object) -> None:
    """Show whether RUN is running, and how it ended.

    Without RUN, use the run in progress below runs/, otherwise the newest.

    With -H, also find runs that were started from another machine.

    If RUN is detached, also fetch the files that its script has completed.

    If RUN is a batch job, also show the scheduler's message.
    """
    from paceline.cli.runs.lost import describe_abandon
    from paceline.cli.runs.run_lookup import resolve_run
    from paceline.cli.runs.sync import sync_run

    path, is_shown = resolve_run(ctx, allow_ended=True), False

    def show() -> None:
        nonlocal is_shown
        is_shown = True
        state = read_state_and_replicas(path)
        if as_json:
            click.echo(json.dumps(state.to_json(), indent=2))
        else:
            say(format_for(describe_run(state), sys.stdout))

    try:
        sync_run(path, show)
    except PacelineError as problem:
        if not is_shown:  # the last known state
            show()
            for line in describe_abandon(path) if isinstance(problem, ConnectError) else ():
                if not as_json:
                    say(f"  {line}")
        raise
