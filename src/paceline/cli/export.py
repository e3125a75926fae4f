"""``paceline export``: a trained model for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.evaluate import run_folder, run_here
from paceline.cli.verb import Verb


@click.command("export", cls=Verb, options_of="paceline.recipes.use:ExportOptions")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, metavar="[OPTIONS]", type=click.UNPROCESSED)
def command(run: Path, options: tuple[str, ...]) -> None:
    """Write the model of RUN for other programs.

    What is written runs no code when it is loaded.
    """
    run_here("paceline.recipes.use.export", ["--run", str(run_folder(run)), *options])
