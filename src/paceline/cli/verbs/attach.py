"""``paceline attach``: shows a detached run as if this terminal had started it."""

from __future__ import annotations

import click

from paceline.cli.options import run_lookup_options
from paceline.cli.verb import Verb


@click.command("attach", cls=Verb)
@run_lookup_options
@click.option("--lines", is_flag=True, help="Print lines as they come, instead of the live screen.")
@click.pass_context
def command(ctx: click.Context, /, lines: bool, **_: object) -> None:
    """Watch RUN in any terminal, with the live screen and its keys.

    Without RUN, use the run in progress. With -H, also find runs that were started from another
    machine; such a run gets a folder below runs/ here.

    Ctrl-C stops the run and gives it time to save; a second Ctrl-C ends it immediately. Ctrl-Z, the
    key d or a closed terminal leaves it running.

    Exit status: that of the run, or 0 if it was left running.
    """
    from paceline.cli.runs.attached import attach_to_run
    from paceline.cli.runs.run_lookup import require_single_run, resolve_run

    ctx.exit(attach_to_run(require_single_run(resolve_run(ctx), "attach"), lines=lines))
