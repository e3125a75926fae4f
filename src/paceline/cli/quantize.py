"""``paceline quantize``: a trained model in 8 bits."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.evaluate import run_folder, run_here
from paceline.cli.verb import Verb


@click.command("quantize", cls=Verb, options_of="paceline.recipes.use:QuantizeOptions")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, metavar="[OPTIONS]", type=click.UNPROCESSED)
def command(run: Path, options: tuple[str, ...]) -> None:
    """Write the model of RUN with weights of 8 bits, for CPUs.

    It is evaluated on the held-out data first, and refused when it loses more accuracy than
    --max-drop.
    """
    run_here("paceline.recipes.use.quantize", ["--run", str(run_folder(run)), *options])
