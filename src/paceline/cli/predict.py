"""``paceline predict``: the classes of images."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.evaluate import run_folder, run_here


@click.command("predict", context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
def command(run: Path, images: tuple[str, ...]) -> None:
    """Tell the class of each IMAGE with the model of RUN, and the probabilities.

    --top-k N shows the N likeliest classes.
    """
    run_here("paceline.recipes.predict", ["--run", str(run_folder(run)), *images])
