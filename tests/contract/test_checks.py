"""Tests what every check must do, on all registered checks and recorded cases.

``fixtures/checks/healthy.json`` is the recorded survey of three healthy hosts. A case
``fixtures/checks/CHECK/OUTCOME_NAME.json`` has changes to it (``path.to.value``; a prefix ``-``
removes) and what the check must find: outcome, hosts, words of the message and of the remedy.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from each_case import each_case
from paceline.checks import CHECKS, load, runner
from paceline.checks.check import LEVELS, Survey
from paceline.checks.runner import applies, evaluate
from paceline.spec.finding import Finding

FOLDER = Path(__file__).parents[1] / "fixtures" / "checks"
SOURCE = Path(__file__).parents[2] / "src" / "paceline" / "checks"
CASES = sorted(FOLDER.glob("*/*.json"))
FAILING_CASES = [
    path
    for path in CASES
    if json.loads(path.read_text())["expect"][0]["outcome"] not in ("pass", "unknown")
]
NOT_CHECKS = {"__init__", "check", "runner", "preflight", "attribution"}


def healthy() -> dict[str, Any]:
    survey: dict[str, Any] = json.loads((FOLDER / "healthy.json").read_text())
    return survey


def apply_change(survey: dict[str, Any], change: dict[str, Any]) -> Survey:
    for path, value in change.items():
        *parents, key = path.removeprefix("-").split(".")
        node = survey
        for name in parents:
            node = node[name]
        if path.startswith("-"):
            del node[key]
        else:
            node[key] = value
    return Survey.from_json(survey)


def case_id(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@each_case("path", CASES, ids=case_id)
def test_evaluates_recorded_cases(path: Path) -> None:
    case = json.loads(path.read_text())
    check = load(path.parent.name)
    result = check.evaluate(apply_change(healthy(), case["change"]))
    assert [(f.outcome, list(f.hosts)) for f in result] == [
        (expectation["outcome"], expectation["hosts"]) for expectation in case["expect"]
    ], result
    for finding, expected in zip(result, case["expect"], strict=True):
        for phrase in expected["says"]:
            assert phrase in finding.message
        for phrase in expected["remedy"]:
            assert phrase in finding.remedy


@each_case("path", FAILING_CASES, ids=case_id)
def test_failing_check_ranks_first(path: Path) -> None:
    """No other check in the registry ranks higher for the changed value."""
    case = json.loads(path.read_text())
    survey = apply_change(healthy(), case["change"])
    first = runner.ranked(evaluate(survey, "full"))[0]
    assert first.check == path.parent.name, first


@each_case("name", CHECKS)
def test_has_recorded_cases(name: str) -> None:
    outcomes = {path.stem.split("_")[0] for path in CASES if path.parent.name == name}
    assert "pass" in outcomes
    assert outcomes & {"fail", "warn"}


@each_case("name", CHECKS)
def test_has_id_and_documentation(name: str) -> None:
    check = load(name)
    assert check.id == name
    assert check.title
    assert CHECKS[name] in LEVELS
    text = import_module(f"paceline.checks.{name}").__doc__ or ""
    assert "?" in text.splitlines()[0]
    assert "Fails when:" in text or "Warns when:" in text


@each_case("name", [name for name in CHECKS if load(name).probe is not None])
def test_failed_probe_gives_unknown(name: str) -> None:
    survey = replace(apply_change(healthy(), {}), failures={name: "no answer in time"})
    (result,) = [finding for finding in evaluate(survey, "full") if finding.check == name]
    assert result.outcome == "unknown"
    assert "no answer in time" in result.message


def test_files_match_registry() -> None:
    files = {path.stem for path in SOURCE.glob("*.py")} - NOT_CHECKS
    assert files == set(CHECKS)


def test_healthy_hosts_pass() -> None:
    result = evaluate(apply_change(healthy(), {}), "full")
    assert {finding.outcome for finding in result} == {"pass"}
    assert runner.exit_status(result) == 0
    assert runner.conclusion(result).startswith("all is well")


def test_single_host_needs_no_network() -> None:
    survey = apply_change(healthy(), {})
    single_host = replace(
        survey, hosts=survey.hosts[:1], facts={"n1": survey.facts["n1"]}, evidence={}, networks={}
    )
    assert {f.outcome for f in evaluate(single_host, "facts")} == {"pass"}
    assert not applies(load("ports"), single_host)


def test_unreachable_host_does_not_hide_results() -> None:
    change = {"refusals": {"n2": {"cause": "refused", "found": "x", "remedy": "y"}}}
    result = evaluate(
        apply_change(healthy(), {**change, "-facts.n2": None, "evidence": {}}), "facts"
    )
    assert result[0].outcome == "fail"
    assert [f for f in result if f.check == "torch" and f.outcome == "pass"]


def test_names_check_accepts_aliases_of_machine() -> None:
    survey = apply_change(healthy(), {})
    same_machine = replace(survey, facts={**survey.facts, "n2": survey.facts["n1"]})
    assert [f.outcome for f in load("names").evaluate(same_machine)] == ["pass"]


def test_survey_json_round_trip() -> None:
    survey = apply_change(healthy(), {})
    assert Survey.from_json(json.loads(json.dumps(survey.to_json()))) == survey


def test_failed_finding_requires_remedy() -> None:
    with pytest.raises(ValueError, match="without a remedy"):
        Finding("x", "fail", (), "bad")


@each_case("path", CASES, ids=case_id)
def test_command_remedies_are_valid_shell(path: Path) -> None:
    case = json.loads(path.read_text())
    for finding in load(path.parent.name).evaluate(apply_change(healthy(), case["change"])):
        for line in finding.remedy.splitlines():
            if ": sudo " in line or ": sed " in line:
                shlex.split(line.partition(": ")[2])


def test_gpu_remedies_contain_no_commands_of_hosts() -> None:
    """Indices and process ids are typed without quotes."""
    rows = ["0;id, A100, 550, 9, 900, 5, 40, 1, Active", "0, A100, 550, 9, 900, 5, 40, 1, Active"]
    report = {"gpus": "\n".join(rows), "apps": "GPU-1, 7, 800\nGPU-1, $(id), 800"}
    case = apply_change(healthy(), {"evidence.gpu": {"n1": report}})
    remedies = [finding.remedy for finding in load("gpu").evaluate(case)]
    assert any("nvidia-smi -r -i 0 " in remedy for remedy in remedies)
    assert any("ps -fp 7;" in remedy for remedy in remedies)
    assert not any("id" in shlex.split(remedy.replace(";", " "))[3:] for remedy in remedies)
