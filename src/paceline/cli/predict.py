"""``paceline predict``: the classes of images or texts."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.evaluate import run_folder, run_here
from paceline.cli.verb import Verb


@click.command("predict", cls=Verb, context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...", type=click.UNPROCESSED)
def command(run: Path, inputs: tuple[str, ...]) -> None:
    """Tell the class of each INPUT with the model of RUN, and the probabilities.

    INPUT is an image file or a folder of images; for a text model a text, or a csv, tsv or txt
    file of texts.

    --top-k N shows the N likeliest classes; --json prints one JSON object a line.
    """
    run_here("paceline.recipes.predict", ["--run", str(run_folder(run)), *inputs])
