"""``paceline stop``: ends a run from any terminal."""

from __future__ import annotations

import time

import click

from paceline.cli.options import run_lookup_options
from paceline.cli.runs.run_lookup import running_runs, specified_run
from paceline.cli.runs.state import end_run, read_state
from paceline.cli.settings import setting
from paceline.cli.verb import Verb, say
from paceline.spec.errors import NodeError
from paceline.spec.settings import Source

POLL_INTERVAL_S = 0.2  # while a run is being stopped
STOP_TIMEOUT_S = 30.0


@click.command("stop", cls=Verb)
@run_lookup_options
@click.option("--now", is_flag=True, help="Give the ranks no time to save.")
@click.pass_context
def command(ctx: click.Context, /, now: bool, **_: object) -> None:
    """End RUN on all its nodes, and return when it has ended.

    Without RUN, use the run in progress below runs/.

    With -H, also find runs that were started from another machine.
    """
    from paceline.cli.runs.run_lookup import resolve_run
    from paceline.cli.runs.sync import stop_remote

    is_named = setting(ctx, "hosts").source is Source.COMMAND_LINE
    if specified_run(ctx) is None and not is_named and not running_runs():
        say("paceline: no run below runs/ is running", err=True)
        return
    path = resolve_run(ctx)
    state = read_state(path)
    if state.is_over or not state.has_launcher:
        say(f"{path}: {state.word}{' already' if state.is_over else ''}", err=True)
        return
    if state.supervisor is not None:
        ran = stop_remote(path, now, STOP_TIMEOUT_S)
        say(f"{path}: {'stopped' if ran else f'{read_state(path).word} already'}", err=True)
        return
    end_run(state, now)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not read_state(path).is_over:
        if time.monotonic() > deadline:
            raise NodeError(f"{path} has not ended within {STOP_TIMEOUT_S:.0f} s", remedy="--now")
        time.sleep(POLL_INTERVAL_S)
    final_state = read_state(path)  # it may have finished by itself just before
    say(f"{path}: {'stopped' if final_state.job is not None else final_state.word}", err=True)
