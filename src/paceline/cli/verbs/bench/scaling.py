"""``paceline bench scaling``: the timing ladder of the user's own command."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from paceline.bench import scaling
from paceline.cli.batch import submit
from paceline.cli.dispatch import prepare, require_transport
from paceline.cli.job_options import build_job
from paceline.cli.options import launch_options
from paceline.cli.recipe_job import parse_recipe_options, prepared_job
from paceline.cli.verb import Verb, say
from paceline.launch.planning.entry import entry_of, opens_store, preload_of
from paceline.recipes import RECIPES
from paceline.rundir.directory import write_text
from paceline.schedulers.scheduler import Scheduler
from paceline.schedulers.script import SUBMITTED_VARIABLE
from paceline.schedulers.submission import SubmittedJob
from paceline.spec.errors import JobError, SettingError
from paceline.spec.hosts import Cluster
from paceline.spec.job import Job, bounds
from paceline.spec.settings import Setting, Source
from paceline.spec.terminal import wrap


@click.command("scaling", cls=Verb, context_settings={"allow_interspersed_args": False})
@launch_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a Python module.")
@click.option("--recipe", is_flag=True, help="SCRIPT is the name of a built-in recipe.")
@click.option("--repeat", type=click.IntRange(1), default=1, help="Number of runs of each layout.")
@click.option("--weak", is_flag=True,
              help="Fix the batch of each process, so that the work grows with the number of"
                   " processes.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              help="Folder for the runs, scaling.json and scaling.svg.")  # fmt: skip
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], module: bool,
            recipe: bool, repeat: int, weak: bool, out: Path | None,
            **_: object) -> None:  # fmt: skip
    """Run SCRIPT with ARGS as 1, 1×P, N×1 and N×P processes and compare the times.

    N is the number of hosts, and P the number of processes on each. Use ARGS to make the script run
    a fixed number of steps with the same global batch.

    If the script uses paceline.train, its samples are counted. Otherwise only the time of the ranks
    is compared. The work is then assumed to be the same in every layout or, with --weak, to grow
    with the number of processes.

    Outside an allocation, --via with a batch system and --nnodes N submits everything as one batch.
    """
    cluster, dispatch = prepare(ctx)
    if ctx.params["plan_only"] and dispatch.kind != "submit":
        raise SettingError(
            "--plan does not apply to the runs of paceline bench scaling",
            found="it prints one run, or the script of a batch",
            remedy="paceline run --plan, with -p and --nnodes of the layout",
        )
    if recipe and module:
        raise SettingError("--recipe and --module cannot be combined")
    folder = out or Path("runs") / f"scaling-{time.strftime('%Y%m%d-%H%M%S')}"
    with contextlib.ExitStack() as stack:
        if recipe:
            if script not in RECIPES:
                raise SettingError(f"there is no recipe {script}", found=", ".join(RECIPES))
            options = parse_recipe_options(ctx, script, args)
            job = stack.enter_context(prepared_job(ctx, script, options, cluster))
        else:
            entry = entry_of(script, args, module=module, no_python=False)
            job = build_job(ctx, entry, name=Path(script).stem, opens_store=opens_store(entry),
                            preload=preload_of(entry))  # fmt: skip
        if dispatch.kind == "submit":
            ctx.exit(submit(ctx, job, folder, dispatch.scheduler, "--out"))
        measured = run_ladder(ctx, job, cluster, folder, repeat, package=recipe)
        rows = scaling.make_rows(measured, weak=weak)
    write_results(folder, rows)
    if ctx.params["as_json"]:
        click.echo(json.dumps(scaling.to_json(rows), indent=2))
        return
    say(scaling.format_table(rows))
    if text := scaling.advice(rows, weak=weak):
        say(f"\n{wrap(text, 80)}")
    if text := queue_time(dispatch.scheduler):
        say(f"\n{wrap(text, 80)}")
    say(f"\nnumbers {folder / 'scaling.json'}\npicture {folder / 'scaling.svg'}")


def write_results(folder: Path, rows: Sequence[scaling.Row]) -> None:
    try:
        write_text(folder, "scaling.json", json.dumps(scaling.to_json(rows), indent=2) + "\n")
        write_text(folder, "scaling.svg", scaling.draw(rows))
    except OSError as error:
        raise SettingError(
            f"{folder} cannot hold the measurement", found=str(error), remedy="--out FOLDER"
        ) from None


def queue_time(scheduler: Scheduler) -> str:
    """Returns how long this batch waited before it began, if its scheduler reports that."""
    number = scheduler.allocation(os.environ)
    if number is None or not scheduler.can_follow() or not os.environ.get(SUBMITTED_VARIABLE):
        return ""
    job = SubmittedJob(scheduler, number)
    state = job.state()
    if state is None or state.queued_s is None:
        return ""
    return f"{job.title} waited {state.queued_s:.0f} s in the queue; the table begins after that."


def run_ladder(ctx: click.Context, job: Job, cluster: Cluster, folder: Path, repeat: int,
          package: bool) -> list[tuple[scaling.Layout, list[scaling.Measurement]]]:  # fmt: skip
    _, nodes = bounds(job.nnodes.value, len(cluster.hosts))
    first = cluster.hosts[0]
    processes = job.nproc_per_node.value or first.slots or first.gpus or 1
    if not isinstance(processes, int):
        raise SettingError(f"bench scaling needs a number, not -p {processes}", remedy="-p N")
    measured, shown_notes = [], set[str]()
    for layout in scaling.ladder(nodes, processes):
        runs = []
        for number in range(repeat):
            say(f"paceline: {layout.label}, run {number + 1} of {repeat}", err=True)
            run_dir = folder / f"{layout.nodes}x{layout.processes}-{number + 1}"
            runs.append(run_layout(ctx, job, cluster, layout, run_dir, package, shown_notes))
        measured.append((layout, runs))
    return measured


def run_layout(ctx: click.Context, job: Job, cluster: Cluster, layout: scaling.Layout,
               run_dir: Path, package: bool,
               shown_notes: set[str]) -> scaling.Measurement:  # fmt: skip
    """Runs one layout once; JobError if it fails: the ladder needs all of them."""
    layout_job = replace(
        job,
        nnodes=Setting(layout.nodes, Source.COMMAND_LINE),
        nproc_per_node=Setting(layout.processes, Source.COMMAND_LINE),
        is_measured=True,
    )
    from paceline.cli.measure.quiet_screen import PlanNotesScreen
    from paceline.cli.runs.run_end import report_failure
    from paceline.launch.launcher import run_job

    screen, transport = PlanNotesScreen(shown_notes), require_transport(ctx.params, "bench scaling")
    start, start_clock = time.time(), time.monotonic()
    outcome = run_job(layout_job, cluster, transport, screen, run_dir=run_dir,
                      parent=run_dir.parent, package=package)  # fmt: skip
    wall = time.monotonic() - start_clock
    if outcome.result.exit_code:
        raise JobError(
            f"the run with {layout.label} processes failed",
            found=report_failure(outcome), exit_code=outcome.result.exit_code,
        )  # fmt: skip
    return scaling.measure(wall, start, outcome.events)
