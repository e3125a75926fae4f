"""The verbs that use the model of a run: evaluate, predict, translate, export, benchmark, quantize.

Each becomes a script of ``recipes.use`` in a process of its own; of these only ``evaluate`` may
also run on every host.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from paceline.cli.applies import given
from paceline.cli.launch import job_of, launch, launch_options, prepare
from paceline.cli.train import RECIPE_MODULES, data_folder, gathered, quiet_torch, with_data
from paceline.cli.verb import Verb, say
from paceline.cli.via import Via
from paceline.recipes.argv import parse
from paceline.recipes.use import EvaluateOptions
from paceline.rundir.records import read_object
from paceline.spec.errors import SettingError
from paceline.spec.job import Entry, Input
from paceline.spec.rundir import CONFIG, MODEL_CONFIG, unfinished, used

SCRIPTS = "paceline.recipes.use"


@click.command("evaluate", cls=Verb, options_of=f"{SCRIPTS}:EvaluateOptions")
@launch_options
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def evaluate(ctx: click.Context, /, run: Path, options: tuple[str, ...], **_: object) -> None:
    """Evaluate the model of RUN; the same figures as its training reported."""
    typed = parse(EvaluateOptions, options, "paceline evaluate")
    folder = run_folder(run)
    cluster, via = prepare(ctx)
    if is_plain(ctx, via):
        run_here("evaluate", ["--run", str(folder), *options])
    with gathered(data_files(folder, typed)) as files:
        job = job_of(
            ctx,
            Entry("module", f"{SCRIPTS}.evaluate", ("--run", str(folder), *options)),
            name="evaluate",
            preload=RECIPE_MODULES,
            inputs=(Input(str(folder), (CONFIG, *used(folder))),),
        )
        job, parent = with_data(quiet_torch(job), files), folder / "evaluations"
        if not typed.data_dir:
            source = typed.data or str(described(folder).get("data", {}).get("source", ""))
            job = replace(job, data=data_folder(source))
        ctx.exit(launch(ctx, job, cluster, via, package=True, parent=parent))


def is_plain(ctx: click.Context, via: Via) -> bool:
    """Nothing was asked for that needs a launcher: one process on this machine will do."""
    one = ctx.params["nproc_per_node"] in (None, 1)
    return one and via.scheduler.is_direct and not given(ctx).keys() - {"nproc_per_node"}


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
    if (folder / MODEL_CONFIG).is_file() or found is None:
        said = read_object(folder / MODEL_CONFIG)
    else:
        said = (read_object(found / "state.json") or {}).get("model")
    return said if isinstance(said, dict) and isinstance(said.get("data", {}), dict) else {}


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


def run_here(script: str, argv: list[str]) -> None:
    """Becomes a fresh Python process that runs a script of ``recipes.use``."""
    sys.stdout.flush()
    module = f"{SCRIPTS}.{script}"
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])  # noqa: S606 - a list


# --- those that need no launcher


def _verb(name: str, options: str, words: str, text: str) -> Verb:
    """A verb that is a script of the same name.

    Args:
        name: Of both.
        options: Class of the options that it takes besides.
        words: What follows RUN, in the words of the help; optional where it has brackets.
        text: The help.
    """

    def use(run: Path, words: tuple[str, ...]) -> None:
        run_here(name, ["--run", str(run_folder(run)), *words])

    needed = not words.startswith("[")
    arguments = [
        click.Argument(["run"], type=click.Path(path_type=Path)),
        click.Argument(["words"], nargs=-1, metavar=words, required=needed, type=click.UNPROCESSED),
    ]
    return Verb(name, callback=use, params=[*arguments], help=text,
                options_of=f"{SCRIPTS}:{options}")  # fmt: skip


predict = _verb("predict", "PredictOptions", "INPUT...", """\
Tell the class of each INPUT with the model of RUN, and the probabilities.

INPUT is an image file or a folder of images; for a text model a text, or a csv, tsv or txt
file of texts.""")  # fmt: skip
translate = _verb("translate", "TranslateOptions", "[SENTENCE...]", """\
Translate each SENTENCE with the model of RUN, or each line of standard input.

One translation a line, and nothing else, is written to standard output.""")  # fmt: skip
export = _verb("export", "ExportOptions", "[OPTIONS]", """\
Write the model of RUN for other programs.

What is written runs no code when it is loaded.""")  # fmt: skip
benchmark = _verb("benchmark", "BenchmarkOptions", "[OPTIONS]", """\
Measure latency and throughput of the model of RUN.""")  # fmt: skip
quantize = _verb("quantize", "QuantizeOptions", "[OPTIONS]", """\
Write the model of RUN with weights of 8 bits, for CPUs.

It is evaluated on the held-out data first, and refused when it loses more accuracy than
--max-drop.""")  # fmt: skip
