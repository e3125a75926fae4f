"""Tests that summary, status, notification, report and explanation of a run name the same cause.

Each recorded run that failed is ended like the launcher ends it, then explained and reported from
its files.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from each_case import each_case
from paceline.cli.runs.run_end import SHOWN_IN_LOG_TAIL, explain_failure, report_failure
from paceline.cli.runs.state import read_state
from paceline.explain.conclusion import conclude
from paceline.explain.evidence import Evidence
from paceline.explain.evidence_reader import from_run
from paceline.explain.rules import load_all
from paceline.launch.notify import RunEnd
from paceline.launch.results.run_outcome import RunOutcome
from paceline.report.writer import write_at_end
from paceline.rundir.records import recorded_cause
from paceline.spec import rundir as names
from paceline.spec.terminal import clean_line

FOLDER = Path(__file__).parents[1] / "fixtures" / "rules"
# there is no summary without a result
RUNS = sorted(path for path in FOLDER.glob("*/hit_*") if (path / names.RESULT).is_file())
RULES = load_all()


@each_case("recorded", RUNS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_outputs_agree_on_cause(recorded: Path, tmp_path: Path) -> None:
    run = tmp_path / recorded.parent.name / recorded.name
    shutil.copytree(recorded, run)
    evidence = from_run(run)
    conclusion = conclude(evidence, RULES)
    (rule, _), *_ = conclusion.matches
    at_end = explain_failure(run, evidence.result, evidence.events)
    if rule.code not in SHOWN_IN_LOG_TAIL:
        assert at_end.startswith(f"paceline: cause: {conclusion.text} [{rule.code}]\n")
    (first, *_) = json.loads((run / names.FINDINGS).read_text())["findings"]
    assert (first["check"], first["outcome"]) == (f"explain/{rule.code}", "fail")
    assert first["message"] == conclusion.text
    if evidence.first_failure is not None:
        ended = RunEnd(run, "", evidence.result, 1.0, cause=recorded_cause(run))
        assert read_state(run).failure == conclusion.text
        assert ended.problem == clean_line(conclusion.text)
    assert write_at_end(run) == ""
    page = html.unescape(re.sub(r"<[^>]+>", "", (run / names.REPORT).read_text()))
    assert " ".join(conclusion.text.split()) in " ".join(page.split())
    _agrees_with_summary(run, evidence, conclusion.text)


def _agrees_with_summary(run: Path, evidence: Evidence, cause: str) -> None:
    """The cause and the line on the first failure name the same rank or host."""
    failure = evidence.first_failure
    if failure is None or failure.is_secondary or failure.kind == "launcher":
        return
    summary = report_failure(RunOutcome(run, evidence.result, evidence.events, {}, 1.0))
    assert summary.startswith(f"paceline: failed first: {failure.describe()}")
    assert failure.where in cause or failure.headline.partition("\n")[0] in cause
    if failure.kind in ("lost", "agent", "lease", "forkserver", "stranger", "hang"):
        assert failure.headline in cause


def test_exit_status_without_match_gives_unknown_cause() -> None:
    evidence = from_run(FOLDER / "killed" / "hit_3")
    failure = evidence.first_failure
    assert failure is not None
    ended = replace(failure, kind="exit", signal=None, code=3, headline="exit status 3")
    conclusion = conclude(replace(evidence, result=replace(evidence.result, failure=ended)), RULES)
    assert conclusion.text == "unknown cause: rank 1 on n2: exit status 3"
    assert conclusion.matches == ()
