"""``paceline explain``: what went wrong, where first, what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import run_lookup_options
from paceline.cli.runs.run_lookup import require_single_run, specified_run
from paceline.cli.settings import setting
from paceline.cli.verb import Verb, say
from paceline.explain.conclusion import Conclusion, conclude, to_findings
from paceline.explain.evidence import Evidence
from paceline.explain.evidence_reader import from_log, from_run, read_log, read_named
from paceline.explain.rules import load_all
from paceline.report import explanation
from paceline.rundir.directory import short, write_explanation
from paceline.rundir.records import is_regular
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError
from paceline.spec.settings import Source
from paceline.spec.terminal import format_for, has_colours

MAX_WHOLE_BYTES = 2 << 20  # of a file in the bundle; of a larger one both ends go into it


@click.command("explain", cls=Verb)
@run_lookup_options
@click.option("--log", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
              metavar="FILE",
              help="Explain this log of any launcher instead; - reads standard input."
              )  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--bundle", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also pack plan, events, logs and findings for support; what looks like a secret"
                   " is left out.")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, log: Path | None, as_json: bool,
            bundle: Path | None, **_: object) -> None:  # fmt: skip
    """Explain what went wrong in RUN.

    Without RUN, use the run in progress below runs/, otherwise the one that was started last, and
    print its run directory first.

    With -H, also find runs that were started from another machine.

    Exit status: 0 if a cause was found or nothing went wrong, 2 if the cause is unknown.
    """
    run: Path | None = None
    if log is not None:
        if ctx.params["run"] is not None:
            raise SettingError("RUN and --log cannot be combined")
        evidence = from_log(read_named(log))
    else:
        from paceline.cli.runs.sync import try_sync

        run = require_single_run(_resolve_run(ctx), "explain")
        evidence = from_run(run, confirmed=try_sync(run))
    conclusion = conclude(evidence, load_all())
    is_running = evidence.launcher is not None and evidence.launcher.alive
    if run is not None and not evidence.has_succeeded and not is_running:
        write_explanation(run, to_findings(conclusion))
    if bundle is not None:
        write_bundle(bundle, run, evidence, conclusion)
    if run is not None and specified_run(ctx) is None and not as_json:
        say(format_for(f"{short(run.absolute())}:", sys.stdout))
    show(conclusion, evidence, as_json)
    ctx.exit(0 if conclusion.matches or conclusion.is_healthy or evidence.has_succeeded else 2)


def _resolve_run(ctx: click.Context) -> Path:
    """Returns the run's folder; accepts any existing folder."""
    name, is_remote = specified_run(ctx), setting(ctx, "hosts").source is Source.COMMAND_LINE
    if name is not None and not is_remote and Path(name).is_dir():
        return Path(name)
    from paceline.cli.runs.run_lookup import resolve_run

    return resolve_run(ctx, allow_ended=True)


def show(conclusion: Conclusion, evidence: Evidence, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(to_json(conclusion), indent=2))
        return
    if evidence.has_succeeded and not _is_divergence(conclusion):
        say(format_for("\n".join(explanation.of_success(evidence)), sys.stdout))
        return
    first, *details = explanation.lines(conclusion, evidence)
    first = format_for(first, sys.stdout)
    click.echo(click.style(first, bold=True) if has_colours(sys.stdout) else first)
    if details:
        say(format_for("\n".join(details), sys.stdout))


def _is_divergence(conclusion: Conclusion) -> bool:
    """Returns whether the conclusion is a loss that is not a number, which ends no script."""
    unit = conclusion.matches[0][1].unit if conclusion.matches else None
    return unit is not None and unit.kind == "numeric"


def to_json(conclusion: Conclusion) -> dict[str, Any]:
    causes = [
        {
            "rule": rule.code,
            "title": rule.title,
            "cause": match.cause,
            "hosts": list(match.hosts),
            "rank": match.rank,
            "confidence": match.confidence,
            "symptom": rule.symptom,
            "evidence": list(match.lines),
            "confirm": match.confirm or rule.sections["Confirm"],
            "remedy": match.remedy or rule.sections["Remedy"],
        }
        for rule, match in conclusion.matches
    ]
    return {"conclusion": conclusion.text, "causes": causes}


def write_bundle(
    bundle: Path, run: Path | None, evidence: Evidence, conclusion: Conclusion
) -> None:
    from paceline.report.bundle import write

    contents: dict[str, Any] = {"explanation.json": to_json(conclusion)}
    for log in evidence.logs:
        rank = "log" if log.rank is None else log.rank
        contents[names.log_file(log.host or "job", rank)] = log.text
    for name in (names.PLAN, names.EVENTS, names.RESULT, names.HOSTS, names.METRICS):
        if run is not None and is_regular(run / name):
            contents[name] = read_log(run / name, MAX_WHOLE_BYTES)
    write(bundle, contents)
    say(f"paceline: wrote {bundle}", err=True)
