"""``paceline report``: one page of what happened in a run, or of how several differ."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import RUN_DIR_OF, Parsed, settings_options
from paceline.cli.runs.run_lookup import current_run, find_run_folder, require_single_run
from paceline.cli.verb import Verb
from paceline.spec import rundir as names
from paceline.spec.errors import PacelineError, SettingError

if TYPE_CHECKING:
    from paceline.report.comparison_page import Goal
    from paceline.report.run import Run


COMPARISON = "comparison.html"
MAX_RUNS = 20  # runs on one page


def parse_goal(value: Any) -> Goal:
    """Parses ``METRIC=VALUE`` or ``SPLIT.METRIC=VALUE``; ValueError for anything else."""
    from paceline.report.comparison_page import Goal

    if isinstance(value, Goal):
        return value
    name, _, figure = str(value).partition("=")
    split, dot, metric = name.rpartition(".")
    try:
        number = float(figure)
    except ValueError:
        number = math.nan
    if not metric or (dot and not split) or not math.isfinite(number):
        raise ValueError(f"{value!r} is not a figure: type accuracy=0.9, or test.accuracy=0.9")
    return Goal(metric, number, split)


@click.command("report", cls=Verb)
@settings_options(RUN_DIR_OF)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--to", "goals", type=Parsed("figure", parse_goal), multiple=True,
              metavar="METRIC=VALUE",
              help="With several runs: show when each first reached this value. Default: the"
                   " best value that all runs reached.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="File to write. Default: report.html in the run directory; for several runs"
              f" {COMPARISON} beside the first.")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, runs: tuple[str, ...], goals: tuple[Goal, ...],
            out: Path | None, **_: object) -> None:  # fmt: skip
    """Print the outcome of RUN, and write an HTML page that shows what happened.

    With several runs: compare them, and draw their curves together.

    Without RUN, use the run in progress below runs/, otherwise the newest.

    The page is one file and needs no network. What looks like a secret is left out: read the
    page before you pass it on.
    """
    from paceline.cli.runs.sync import try_sync
    from paceline.report import comparison_page, run_page
    from paceline.report.findings import draw
    from paceline.report.writer import read_run, write
    from paceline.rundir.directory import short

    ctx.params["run"] = runs[0] if len(runs) == 1 else None
    paths = [current_run(ctx)] if len(runs) < 2 else [find_run_folder(name) for name in runs]
    if len(paths) > MAX_RUNS:
        message = f"{len(paths)} runs do not fit on one page"
        raise SettingError(message, remedy=f"At most {MAX_RUNS}")
    if goals and len(paths) < 2:
        raise SettingError("--to compares runs", found="one run", remedy="Name several runs")
    for path in paths:
        require_single_run(path, "report")
        try_sync(path)  # it may go on, or have ended, on another host
        explain_if_missing(path)
    loaded: list[Run] = [read_run(path) for path in paths]
    if len(loaded) == 1:
        page, target = run_page.build_page(loaded[0]), paths[0] / names.REPORT
    else:
        page, target = comparison_page.build_page(loaded, goals), paths[0].parent / COMPARISON
    write(page, out or target)
    draw([page.outcome], page.terminal_tables, [short((out or target).absolute())], sys.stdout)


def explain_if_missing(path: Path) -> None:
    """Looks for the cause of a failure that nobody has looked into yet; the report shows it."""
    from paceline.explain.conclusion import conclude, to_findings
    from paceline.explain.evidence_reader import from_run
    from paceline.explain.rules import load_all
    from paceline.rundir.directory import write_explanation
    from paceline.rundir.records import objects_in, read_object

    findings = objects_in((read_object(path / names.FINDINGS) or {}).get("findings"))
    if any(str(finding.get("check", "")).startswith("explain/") for finding in findings):
        return
    try:
        evidence = from_run(path)
    except PacelineError:
        return
    if evidence.launcher is None and not evidence.has_succeeded:
        write_explanation(path, to_findings(conclude(evidence, load_all())))
