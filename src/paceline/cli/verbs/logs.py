"""``paceline logs``: prints what the ranks of a run have written, and follows it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from paceline.cli.options import run_lookup_options
from paceline.cli.runs.rank_logs import LogReader, rank_logs
from paceline.cli.verb import Verb, say
from paceline.spec.errors import SettingError
from paceline.spec.terminal import format_for

POLL_INTERVAL_S = 0.3


@click.command("logs", cls=Verb)
@run_lookup_options
@click.option("--rank", type=click.IntRange(0), help="Show only this rank.")
@click.option("--host", metavar="NAME", help="Show only the ranks of this host.")
@click.option(
    "-n", "--tail", type=click.IntRange(0), help="Start with the last N lines of each log."
)
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until the run ends.")
@click.pass_context
def command(ctx: click.Context, /, rank: int | None, host: str | None, tail: int | None,
            follow: bool, **_: object) -> None:  # fmt: skip
    """Print the logs of RUN, each line labelled HOST/RANK.

    Without RUN, use the run in progress below runs/, otherwise the newest.

    With -H, also find runs that were started from another machine.
    """
    from paceline.cli.runs.describe import describe_run
    from paceline.cli.runs.run_lookup import require_single_run, resolve_run
    from paceline.cli.runs.state import read_state
    from paceline.cli.runs.sync import keep_synced, try_sync

    path = require_single_run(resolve_run(ctx, allow_ended=True), "logs")
    readers: dict[Path, LogReader] = {}

    def show(*, to_the_end: bool) -> None:
        for file in rank_logs(path, rank, host):
            if file not in readers:
                readers[file] = LogReader(file, tail, follow=follow)
            readers[file].show(to_the_end=to_the_end)

    if follow:
        with keep_synced(path) as is_over:
            has_ended = False
            while not has_ended:
                has_ended = is_over()
                show(to_the_end=has_ended)
                time.sleep(0 if has_ended else POLL_INTERVAL_S)
    else:
        try_sync(path)
        show(to_the_end=True)
    if (state := read_state(path)).lost:  # nobody else says why there is no more
        say(format_for(describe_run(state), sys.stderr), err=True)
    if not readers and (rank is not None or host is not None):
        which = [f"rank {rank}"] if rank is not None else []
        raise SettingError(
            f"{path} has no log of {' on '.join([*which, *([host] if host else [])])}",
            found=", ".join(f"{file.parent.name}/{file.stem}" for file in rank_logs(path)[:20]),
        )
