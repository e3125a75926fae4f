"""``paceline translate``: sentences in another language."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.evaluate import run_folder, run_here
from paceline.cli.verb import Verb


@click.command("translate", cls=Verb, options_of="paceline.recipes.use:TranslateOptions")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("sentences", nargs=-1, metavar="[SENTENCE...]", type=click.UNPROCESSED)
def command(run: Path, sentences: tuple[str, ...]) -> None:
    """Translate each SENTENCE with the model of RUN, or each line of standard input.

    One translation a line, and nothing else, is written to standard output.
    """
    run_here("paceline.recipes.use.translate", ["--run", str(run_folder(run)), *sentences])
