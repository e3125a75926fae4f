"""``paceline evaluate``: a trained model's figures, in a fresh process or on every host."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from paceline.cli.applies import given
from paceline.cli.data_files import gathered
from paceline.cli.launch import job_of, launch, launch_options, prepare
from paceline.cli.train import RECIPE_MODULES, quiet_torch, with_data
from paceline.cli.verb import Verb, say
from paceline.cli.via import Way
from paceline.recipes.flags import parse
from paceline.recipes.use import EvaluateOptions
from paceline.spec.errors import SettingError
from paceline.spec.job import Entry, Input
from paceline.spec.rundir import CHECKPOINTS, CONFIG, MODEL, MODEL_CONFIG, unfinished

MODULE = "paceline.recipes.use.evaluate"


@click.command("evaluate", cls=Verb, options_of="paceline.recipes.use:EvaluateOptions")
@launch_options
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, run: Path, options: tuple[str, ...], **_: object) -> None:
    """Evaluate the model of RUN; the same figure as its training reported, to the digit."""
    typed = parse(EvaluateOptions, options, "paceline evaluate")
    folder = run_folder(run)
    cluster, way = prepare(ctx)
    if is_plain(ctx, way):
        run_here(MODULE, ["--run", str(folder), *options])
    with gathered(data_files(folder, typed)) as files:
        job = job_of(
            ctx,
            Entry("module", MODULE, ("--run", str(folder), *options)),
            name="evaluate",
            preload=RECIPE_MODULES,
            inputs=(Input(str(folder), used_files(folder)),),
        )
        job, parent = with_data(quiet_torch(job), files), folder / "evaluations"
        ctx.exit(launch(ctx, job, cluster, way, package=True, parent=parent))


def is_plain(ctx: click.Context, way: Way) -> bool:
    """Nothing was asked for that needs a launcher: one process on this machine will do."""
    one = ctx.params["nproc_per_node"] in (None, 1)
    return one and way.name in ("ssh", "local") and not given(ctx).keys() - {"nproc_per_node"}


def data_files(folder: Path, typed: EvaluateOptions) -> list[str]:
    """Files that may hold the data of the evaluation: those that are named, else recorded."""
    if typed.data_dir:
        return []
    recorded = described(folder).get("data", {})
    names = [recorded.get(key) for key in ("source", "target", "test")]
    return [typed.data, typed.target] if typed.data else [name for name in names if name]


def described(folder: Path) -> dict[str, Any]:
    """What the run says of its model; empty where that cannot be read, which a rank will tell."""
    found = unfinished(folder)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if (folder / MODEL_CONFIG).is_file() or found is None:
            said = json.loads((folder / MODEL_CONFIG).read_text(encoding="utf-8"))
        else:
            said = json.loads((found / "state.json").read_text(encoding="utf-8"))["model"]
        return said if isinstance(said, dict) and isinstance(said.get("data", {}), dict) else {}
    return {}


def run_folder(run: Path) -> Path:
    """The run directory; SettingError when it holds neither a model nor a checkpoint."""
    folder = run.absolute()
    if (folder / MODEL_CONFIG).is_file():
        return folder
    if (found := unfinished(folder)) is not None:
        say(f"{run} has no finished model: using its checkpoint {found.name}", err=True)
        return folder
    raise SettingError(
        f"{run} holds no trained model",
        found=f"no {folder / MODEL_CONFIG}, and no checkpoint",
        remedy="Name the run directory that `paceline train` printed",
    )


def used_files(folder: Path) -> tuple[str, ...]:
    """What other hosts need of a run."""
    finished = (folder / MODEL_CONFIG).is_file()
    return (MODEL, CONFIG) if finished else (MODEL, CONFIG, CHECKPOINTS)


def run_here(module: str, argv: list[str]) -> None:
    """Becomes a fresh Python process that runs ``module``."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])  # noqa: S606 - a list
