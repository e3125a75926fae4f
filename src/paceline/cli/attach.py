"""``paceline attach``: looks at a run that goes on, as if its terminal had never been left."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.flags import of_a_left_run
from paceline.cli.verb import Verb


@click.command("attach", cls=Verb)
@of_a_left_run
@click.option("--lines", is_flag=True, help="Lines as they come, instead of the live screen.")
@click.pass_context
def command(ctx: click.Context, /, lines: bool, **_: object) -> None:
    """Look at RUN while it runs, in any terminal, and ask things of it.

    Without RUN: the one that is running. With -H also one that was started from another machine; it
    gets a folder below runs/ here.

    Ctrl-C stops the run, with time to save; once more, at once. Ctrl-Z, the key d or a closed
    terminal leave it running.

    Exit status: the run's own, or 0 when it was left running.
    """
    from paceline.cli.elsewhere import meant

    ctx.exit(attach_to(meant(ctx), lines=lines))


def attach_to(path: Path, *, lines: bool = False) -> int:
    """As :func:`paceline.cli.attached.look_until_over`, which is imported when it is needed."""
    from paceline.cli.attached import look_until_over

    return look_until_over(path, lines=lines)
