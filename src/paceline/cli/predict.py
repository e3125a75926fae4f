"""``paceline predict``: the classes of images or texts."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.evaluate import run_folder, run_here
from paceline.cli.verb import Verb


@click.command("predict", cls=Verb, options_of="paceline.recipes.use:PredictOptions")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=click.UNPROCESSED)
def command(run: Path, inputs: tuple[str, ...]) -> None:
    """Tell the class of each INPUT with the model of RUN, and the probabilities.

    INPUT is an image file or a folder of images; for a text model a text, or a csv, tsv or txt
    file of texts.
    """
    run_here("paceline.recipes.use.predict", ["--run", str(run_folder(run)), *inputs])
