"""``paceline benchmark``: latency and throughput of a trained model."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.evaluate import run_folder, run_here
from paceline.cli.verb import Verb


@click.command("benchmark", cls=Verb, options_of="paceline.recipes.use:BenchmarkOptions")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, metavar="[OPTIONS]", type=click.UNPROCESSED)
def command(run: Path, options: tuple[str, ...]) -> None:
    """Measure latency and throughput of the model of RUN."""
    run_here("paceline.recipes.use.benchmark", ["--run", str(run_folder(run)), *options])
