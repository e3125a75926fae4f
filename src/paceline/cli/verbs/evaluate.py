"""``paceline evaluate``: the model of a run on held-out data, here or on every host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from paceline.cli.applicability import specified_options
from paceline.cli.dispatch import Dispatch, prepare
from paceline.cli.job_options import build_job
from paceline.cli.launch import launch_job
from paceline.cli.model_scripts import SCRIPTS, model_folder, run_script
from paceline.cli.options import launch_options
from paceline.cli.recipe_job import (
    RECIPE_MODULES,
    add_data_folder,
    data_folder,
    existing_path,
    gather_files,
    has_remote_host,
    path_input,
    quiet_torch,
)
from paceline.cli.verb import Verb
from paceline.recipes.argv import parse
from paceline.recipes.use import EvaluateOptions
from paceline.rundir.named_paths import require_named
from paceline.rundir.records import read_object
from paceline.spec.errors import SettingError
from paceline.spec.formatting import shell_text
from paceline.spec.job import Entry, Input
from paceline.spec.rundir import CONFIG, MODEL_CONFIG
from paceline.spec.training.used_weights import model_paths, usable_checkpoint


@click.command("evaluate", cls=Verb, options_of=f"{SCRIPTS}:EvaluateOptions")
@launch_options
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, run: Path, options: tuple[str, ...], **_: object) -> None:
    """Evaluate the model of RUN and print the figures that its training reported."""
    parsed = parse(EvaluateOptions, options, "paceline evaluate")
    folder = model_folder(run)
    cluster, dispatch = prepare(ctx)
    if needs_no_launcher(ctx, dispatch):
        run_script("evaluate", ["--run", str(folder), *options])
    if parsed.tasks:
        raise SettingError(
            "--tasks runs in one process on this machine",
            remedy=shell_text(["paceline", "evaluate", str(run), *options]),
        )
    base, base_inputs = path_input(recorded_base(folder))
    if has_remote_host(cluster):
        # --data would evaluate on all of the training data instead of the recorded test set
        command = shell_text(["paceline", "evaluate", "-H", "local", str(run), *options])
        data = [] if parsed.data or parsed.data_dir else recorded_data(folder)
        for path in [*filter(None, map(existing_path, data)), *([base] if base_inputs else [])]:
            require_named(folder, path, f"To evaluate on this machine: {command}")
    with gather_files(data_files(folder, parsed)) as files:
        job = build_job(
            ctx,
            Entry("module", f"{SCRIPTS}.evaluate", ("--run", str(folder), *options)),
            name="evaluate",
            preload=RECIPE_MODULES,
            inputs=(Input(str(folder), (CONFIG, *model_paths(folder))),),
        )
        if job.ship.value != "never":
            job = replace(job, inputs=(*job.inputs, *base_inputs))
        job, parent = add_data_folder(quiet_torch(job), files), folder / "evaluations"
        if not parsed.data_dir:
            source = parsed.data or str(read_model_config(folder).get("data", {}).get("source", ""))
            job = replace(job, data=data_folder(source))
        ctx.exit(launch_job(ctx, job, cluster, dispatch, package=True, parent=parent))


def needs_no_launcher(ctx: click.Context, dispatch: Dispatch) -> bool:
    """Returns whether one process on this machine suffices for these options."""
    if ctx.params["nproc_per_node"] not in (None, 1) or not dispatch.scheduler.is_direct:
        return False
    return not specified_options(ctx).keys() - {"nproc_per_node"}


def data_files(folder: Path, options: EvaluateOptions) -> list[str]:
    """Files that may hold the data of the evaluation: those that are named, else recorded."""
    if options.data_dir:
        return []
    if options.data:
        return [options.data, options.target]
    return recorded_data(folder)


def recorded_data(folder: Path) -> list[str]:
    """Returns the data of the training, as the run names it: of training, targets and test."""
    recorded = read_model_config(folder).get("data", {})
    return [str(recorded[key]) for key in ("source", "target", "test") if recorded.get(key)]


def recorded_base(folder: Path) -> str:
    """Returns the model that a fine-tuning of a language model started from; else empty."""
    recorded = read_model_config(folder)
    return str(recorded.get("model", "")) if recorded.get("task") == "sft" else ""


def read_model_config(folder: Path) -> dict[str, Any]:
    """Reads the run's description of its model; empty if it is unreadable, which a rank reports."""
    checkpoint = usable_checkpoint(folder)
    if (folder / MODEL_CONFIG).is_file() or checkpoint is None:
        config = read_object(folder / MODEL_CONFIG)
    else:
        config = (read_object(checkpoint / "state.json") or {}).get("model")
    return config if isinstance(config, dict) and isinstance(config.get("data", {}), dict) else {}
