"""``paceline explain``: what went wrong, where first, what to do."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from pathlib import Path
from typing import Any

import click

from paceline.cli.flags import of_a_left_run
from paceline.cli.runs import named_run
from paceline.cli.sources import setting
from paceline.cli.verb import Verb, say
from paceline.explain.conclusion import Conclusion, conclude, to_findings
from paceline.explain.evidence import Evidence
from paceline.explain.evidence_reader import from_log, from_result, from_run, read_log, read_named
from paceline.explain.rules import load_all
from paceline.report import explanation
from paceline.rundir.records import is_regular, read_object
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError
from paceline.spec.events import Event
from paceline.spec.failure import Result
from paceline.spec.settings import Source
from paceline.spec.terminal import for_reader

WHOLE = 2 << 20  # bytes of a file that go whole into the bundle; of a larger one both ends
SHOWN_ANYWAY = ("exception", "said-why")  # their words stand in the last lines of a failed run


@click.command("explain", cls=Verb)
@of_a_left_run
@click.option(
    "--log",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="Explain this log instead, of whatever launcher; - reads it from standard input.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also pack plan, events, logs and findings for support: no secrets.",
)
@click.pass_context
def command(ctx: click.Context, /, log: Path | None, as_json: bool,
            bundle: Path | None, **_: object) -> None:  # fmt: skip
    """Say what went wrong in RUN.

    Without RUN: the one below runs/ that is running, else the newest there.

    With -H also a run that was started from another machine.

    Exit status: 0 a cause was found (or nothing went wrong), 2 the cause is unknown.
    """
    run: Path | None = None
    if log is not None:
        if ctx.params["run"] is not None:
            raise SettingError("RUN and --log exclude each other")
        evidence = from_log(read_named(log))
    else:
        from paceline.cli.elsewhere import as_far_as_possible

        run = _meant(ctx)
        evidence = from_run(run, confirmed=as_far_as_possible(run))
    found = conclude(evidence, load_all())
    goes_on = evidence.launcher is not None and evidence.launcher.alive
    if run is not None and not well(evidence) and not goes_on:
        keep(run, found)
    if bundle is not None:
        pack(bundle, run, evidence, found)
    show(found, evidence, as_json)
    ctx.exit(0 if found.matches or well(evidence) else 2)


def _meant(ctx: click.Context) -> Path:
    """The run's folder; any folder that is named as one."""
    named, elsewhere = named_run(ctx), setting(ctx, "hosts").source is Source.COMMAND_LINE
    if named is not None and not elsewhere and Path(named).is_dir():
        return Path(named)
    from paceline.cli.elsewhere import meant

    return meant(ctx, ended=True)


def well(evidence: Evidence) -> bool:
    """True when nothing went wrong."""
    return evidence.result.exit_code == 0


def show(found: Conclusion, evidence: Evidence, as_json: bool) -> None:
    """Prints the explanation."""
    if as_json:
        click.echo(json.dumps(to_json(found), indent=2))
        return
    if well(evidence):
        say(for_reader("\n".join(explanation.of_success(evidence)), sys.stdout))
        return
    first, *rest = explanation.lines(found, evidence)
    first = for_reader(first, sys.stdout)
    click.echo(click.style(first, bold=True) if sys.stdout.isatty() else first)
    say(for_reader("\n".join(rest), sys.stdout))


def to_json(found: Conclusion) -> dict[str, Any]:
    """The object of ``--json``."""
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
        for rule, match in found.matches
    ]
    return {"conclusion": found.text, "causes": causes}


def keep(run: Path, found: Conclusion) -> None:
    """Writes the conclusion into the run's findings.json, behind what the checks found."""
    file = run / names.FINDINGS
    said = read_object(file) or {}
    before = said.get("findings")
    kept = [
        one
        for one in (before if isinstance(before, list) else [])
        if isinstance(one, dict) and not str(one.get("check", "")).startswith("explain/")
    ]
    both = [*kept, *(finding.to_json() for finding in to_findings(found))]
    new = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):  # a run on a full or foreign disk can still be explained
        with new.open("x", encoding="utf-8") as out:
            json.dump({**said, "findings": both}, out, indent=2)
            out.write("\n")
        new.replace(file)
    with contextlib.suppress(OSError):
        new.unlink()


def pack(bundle: Path, run: Path | None, evidence: Evidence, found: Conclusion) -> None:
    """Writes the support bundle."""
    from paceline.report.bundle import write

    contents: dict[str, Any] = {"explanation.json": to_json(found)}
    for log in evidence.logs:
        who = "log" if log.rank is None else log.rank
        contents[names.log_file(log.host or "job", who)] = log.text
    for name in (names.PLAN, names.EVENTS, names.RESULT, names.HOSTS, names.METRICS):
        if run is not None and is_regular(run / name):
            contents[name] = read_log(run / name, WHOLE)
    write(bundle, contents)
    say(f"paceline: wrote {bundle}", err=True)


def after_failure(run: Path, result: Result, events: tuple[Event, ...]) -> str:
    """For the end of a failed run: the conclusion, written down there and as text to show.

    The text is empty where it would only repeat the traceback that is shown anyway.

    Args:
        run: The run directory.
        result, events: How it ended and what happened, as its launcher knows it.
    """
    found = conclude(from_result(run, result, events), load_all())
    keep(run, found)
    if not found.matches or found.matches[0][0].code in SHOWN_ANYWAY:
        return ""
    return "\n".join(
        f"paceline: {line}" if at == 0 else f"  {line}"
        for at, line in enumerate(explanation.short(found))
    )
