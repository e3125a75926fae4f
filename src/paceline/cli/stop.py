"""``paceline stop``: ends a run from any terminal."""

from __future__ import annotations

import signal
import time

import click

from paceline.cli.flags import of_a_run
from paceline.cli.runs import RunState, current_run, look_at, named_run, still_running
from paceline.cli.verb import Verb, say
from paceline.remote import this_machine
from paceline.rundir.ownership import owner_here
from paceline.spec.errors import NodeError
from paceline.spec.terminal import clean

LOOK_EVERY_S = 0.2
PATIENCE_S = 30.0


@click.command("stop", cls=Verb)
@of_a_run
@click.option("--now", is_flag=True, help="Do not give the ranks time to save anything.")
@click.pass_context
def command(ctx: click.Context, /, now: bool, **_: object) -> None:
    """End RUN on all its nodes; return when it is over.

    Without RUN: the one below runs/ that is running.
    """
    if named_run(ctx) is None and not still_running():
        say("paceline: no run below runs/ is running", err=True)
        return
    path = current_run(ctx)
    state = look_at(path)
    if state.over or state.word == "not started":
        say(clean(f"{path}: {state.word} already"), err=True)
        return
    end(state, now)
    deadline = time.monotonic() + PATIENCE_S
    while not look_at(path).over:
        if time.monotonic() > deadline:
            raise NodeError(f"{path} has not ended within {PATIENCE_S:.0f} s", remedy="--now")
        time.sleep(LOOK_EVERY_S)
    say(clean(f"{path}: stopped"), err=True)


def end(state: RunState, now: bool) -> None:
    """Tells the scheduler, or the launcher by its recorded identity."""
    if state.job is not None:
        state.job.cancel(kill=now)
        return
    owner = state.owner or {}
    if not owner_here(owner):
        raise NodeError(
            f"the launcher of {state.path} runs on {owner.get('host')}",
            remedy=f"Type this there: ssh {owner.get('host')}",
        )
    for _ in range(2 if now else 1):
        this_machine.send(int(owner["pid"]), owner.get("start", 0), signal.SIGTERM)
