"""``paceline forecast``: how long a training would take on each number of hosts."""

from __future__ import annotations

import contextlib
import difflib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import click

from paceline.bench import forecast as forecasting
from paceline.bench.saved_forecasts import (
    FOLDER_PREFIX,
    command_key,
    describe_comparison,
    save_comparison,
)
from paceline.cli.batch import submit
from paceline.cli.dispatch import Dispatch, prepare
from paceline.cli.job_options import build_job
from paceline.cli.measure.probes import Prober, measure
from paceline.cli.measure.project_code import require_training_library
from paceline.cli.options import Number, Parsed, Seconds, launch_options
from paceline.cli.recipe_job import (
    check_host_names,
    parse_recipe_options,
    prepared_job,
    require_recipe_first,
)
from paceline.cli.runs.run_lookup import find_run_folder
from paceline.cli.verb import Verb, say
from paceline.launch.planning.entry import entry_of, opens_store, preload_of
from paceline.recipes import RECIPES
from paceline.spec import rundir
from paceline.spec.errors import SettingError
from paceline.spec.formatting import parse_bit_rate
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job, bounds
from paceline.spec.terminal import wrap
from paceline.spec.training import communication

DEFAULT_SECONDS = 10.0


class ForecastVerb(Verb):
    """Behind a recipe's name its options may stand among ours; a script's are its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        name = next((word for word in args if word in RECIPES or word.endswith(".py")), "")
        if name in RECIPES and not {"-m", "--module"}.intersection(args):
            ctx.allow_interspersed_args = ctx.ignore_unknown_options = True
        return super().parse_args(ctx, args)


@click.command("forecast", cls=ForecastVerb, context_settings={"allow_interspersed_args": False})
@launch_options
@click.option("-m", "--module", is_flag=True, help="WHAT is a Python module.")
@click.option("--up-to", type=click.IntRange(1, forecasting.MAX_HOSTS), metavar="N",
              help="Forecast up to N hosts. More hosts than you named are assumed to be like the"
              f" last one. Above {forecasting.DENSE_HOSTS} hosts, only some numbers are forecast."
              " Default: the named hosts.")  # fmt: skip
@click.option("--weak", is_flag=True,
              help="Fix the batch of each host, so that the global batch grows with the number"
                   " of hosts.")  # fmt: skip
@click.option("--each-host", is_flag=True,
              help="Measure every host alone, instead of only one host of each kind.")  # fmt: skip
@click.option("--seconds", type=Seconds(0.0), default=DEFAULT_SECONDS, show_default=True,
              metavar="N",
              help="How long to measure steps, first on one host and then on two. A round through"
              " all batch sizes that has begun is completed.")  # fmt: skip
@click.option("--link", type=Parsed("rate", parse_bit_rate), metavar="RATE",
              help="Assume a link such as 100mbit or 1gbit between equal hosts. Steps are then"
                   " measured on one host only.")  # fmt: skip
@click.option("--price", type=Number(0.0), metavar="MONEY",
              help="Price of a host per hour: also print the cost of the training.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              help="Folder for forecast.json and forecast.svg.")  # fmt: skip
@click.option("--compare", metavar="RUN",
              help="Compare a run with its forecast instead.")  # fmt: skip
@click.argument("what", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, what: str | None, args: tuple[str, ...], module: bool,
            up_to: int | None, weak: bool, out: Path | None, compare: str | None,
            **_: object) -> None:  # fmt: skip
    """Predict how long WHAT, a recipe or a script, would train on 1, 2, 3, … hosts.

    The command runs a few steps on one host and on two hosts. It times an all-reduce between these
    two, and the links between all hosts. For each number of hosts it then prints the time of a
    step, what limits it, and what would help. The run directories of successful measurements are
    removed. A script has to use paceline.train.
    """
    if compare is not None:
        if what is not None:
            raise SettingError("--compare takes a run, and nothing else")
        show_comparison(ctx, find_run_folder(compare))
        return
    if what is None:
        raise SettingError(
            "nothing to forecast", remedy="paceline forecast RECIPE or SCRIPT, with its arguments"
        )
    require_recipe_first(what, args, "forecast")
    cluster, dispatch = prepare(ctx)
    if ctx.params["plan_only"] and dispatch.kind != "submit":
        raise SettingError(
            "--plan does not apply to the few steps of paceline forecast",
            found="it prints one run, or the script of a batch",
            remedy=f"paceline {'train' if what in RECIPES else 'run'} --plan",
        )
    from paceline.launch.planning.planner import choose_hosts
    from paceline.rundir.directory import fresh_path, write_text

    folder = out or fresh_path(Path(rundir.DEFAULT_PARENT), FOLDER_PREFIX.rstrip("-"))
    with forecast_job(ctx, what, args, module, cluster, dispatch) as (job, package):
        if dispatch.kind == "submit":
            ctx.exit(submit(ctx, job, folder, dispatch.scheduler, "--out"))
        hosts = choose_hosts(job, cluster)
        cluster = replace(cluster, hosts=hosts[: bounds(job.nnodes.value, len(hosts))[1]])
        with results_folder(folder):
            max_hosts = up_to or len(cluster.hosts)
            measured = measure(Prober(ctx, job, cluster, dispatch, package), max_hosts)
            forecasts = forecasting.forecast(
                measured, forecasting.host_counts(max_hosts), weak=weak, price=ctx.params["price"]
            )
            record = {"command": command_key(asdict(job.entry)), "made": time.time(),
                    "ranks": measured.ranks, "asked": job.nproc_per_node.value, "weak": weak,
                    "conclusion": forecasting.conclusion(forecasts),
                    **forecasting.to_json(forecasts, measured)}  # fmt: skip
            if ctx.params["as_json"]:
                click.echo(json.dumps(record, indent=2))
            else:
                say(wrap(forecasting.conclusion(forecasts), 80) + "\n")
                say(forecasting.render_table(forecasts, measured))
            with writing_results(folder):
                text = json.dumps(record, indent=2) + "\n"
                write_text(folder, rundir.FORECAST, text)
                write_text(folder, "forecast.svg", forecasting.render_svg(forecasts))
    if not ctx.params["as_json"]:
        say(f"\nnumbers {folder / rundir.FORECAST}\npicture {folder / 'forecast.svg'}")


@contextlib.contextmanager
def results_folder(folder: Path) -> Iterator[None]:
    """Makes a folder before anything is measured, and removes it if it stays empty."""
    existed = folder.exists()
    with writing_results(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if not existed:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()


@contextlib.contextmanager
def writing_results(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"{folder} cannot hold the forecast", found=str(error), remedy="--out FOLDER"
        ) from None


@contextlib.contextmanager
def forecast_job(ctx: click.Context, what: str, args: tuple[str, ...], module: bool,
            cluster: Cluster, dispatch: Dispatch) -> Iterator[tuple[Job, bool]]:  # fmt: skip
    """Returns the job to measure, and whether this package is sent with it.

    Raises:
        SettingError: It does not train with paceline.train, or not on these hosts.
    """
    if what in RECIPES and not module and not Path(what).is_file():
        options = parse_recipe_options(ctx, what, args)
        if options.find_lr or options.find_batch:
            raise SettingError("--find-lr and --find-batch train nothing that could be forecast")
        communication.validate_forecast(options.communication)
        if ctx.params["link"] and options.communication != "exact":
            raise SettingError(
                f"--communication {options.communication} is tried on two hosts, and --link"
                " measures one",
                remedy="leave it out: the forecast says which method would help",
            )
        if options.batch_per_process and not ctx.params["weak"]:
            raise SettingError(
                f"--batch-per-process {options.batch_per_process} has a larger global batch on more"
                " hosts, and this forecast would be of the same on all",
                remedy="--weak, or --global-batch in its place",
            )
        if options.drop_slow:
            say("paceline: --drop-slow is not forecast: every host has its share", err=True)
        with prepared_job(ctx, what, options, cluster) as job:
            check_host_names(options, job, cluster, dispatch)
            yield job, True
        return
    matches = difflib.get_close_matches(what, RECIPES, 1)
    if matches and not module and not Path(what).exists():
        raise SettingError(
            f"there is no recipe or script {what}", remedy=f"did you mean {matches[0]}?"
        )
    entry = entry_of(what, args, module=module)
    require_training_library(entry)
    yield build_job(ctx, entry, name=Path(what).stem, opens_store=opens_store(entry),
                 preload=preload_of(entry)), False  # fmt: skip


def show_comparison(ctx: click.Context, run: Path) -> None:
    try:
        comparison = save_comparison(run)
    except OSError as error:
        message = f"{run}: the comparison cannot be kept there"
        raise SettingError(message, found=str(error)) from None
    if ctx.params["as_json"]:
        click.echo(json.dumps(comparison, indent=2))
    else:
        say(wrap(describe_comparison(comparison), 80))
