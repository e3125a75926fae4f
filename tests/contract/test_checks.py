"""What every check must do, over the registry and recorded cases.

``fixtures/checks/healthy.json`` is the recorded survey of three well hosts. A case
``fixtures/checks/CHECK/OUTCOME_NAME.json`` says what is changed in it (``path.to.value``; a
``-`` in front removes) and what the check must find: outcome, hosts, words of the message and of
the remedy.
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
BLAMED = [
    path
    for path in CASES
    if json.loads(path.read_text())["expect"][0]["outcome"] not in ("pass", "unknown")
]
NOT_CHECKS = {"__init__", "check", "runner", "preflight", "attribution"}


def healthy() -> dict[str, Any]:
    survey: dict[str, Any] = json.loads((FOLDER / "healthy.json").read_text())
    return survey


def changed(survey: dict[str, Any], change: dict[str, Any]) -> Survey:
    for path, value in change.items():
        *parents, last = path.removeprefix("-").split(".")
        place = survey
        for name in parents:
            place = place[name]
        if path.startswith("-"):
            del place[last]
        else:
            place[last] = value
    return Survey.from_json(survey)


def case_id(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@each_case("path", CASES, ids=case_id)
def test_judges_as_recorded(path: Path) -> None:
    case = json.loads(path.read_text())
    check = load(path.parent.name)
    found = check.evaluate(changed(healthy(), case["change"]))
    assert [(f.outcome, list(f.hosts)) for f in found] == [
        (one["outcome"], one["hosts"]) for one in case["expect"]
    ], found
    for finding, wanted in zip(found, case["expect"], strict=True):
        for words in wanted["says"]:
            assert words in finding.message
        for words in wanted["remedy"]:
            assert words in finding.remedy


@each_case("path", BLAMED, ids=case_id)
def test_the_conclusion_is_that_of_the_case(path: Path) -> None:
    """Nothing else in the registry blames somebody for what the case changed."""
    case = json.loads(path.read_text())
    survey = changed(healthy(), case["change"])
    first = runner.ranked(evaluate(survey, "full"))[0]
    assert first.check == path.parent.name, first


@each_case("name", CHECKS)
def test_has_recorded_cases(name: str) -> None:
    outcomes = {path.stem.split("_")[0] for path in CASES if path.parent.name == name}
    assert "pass" in outcomes
    assert outcomes & {"fail", "warn"}


@each_case("name", CHECKS)
def test_is_what_it_is_called(name: str) -> None:
    check = load(name)
    assert check.id == name
    assert check.title
    assert CHECKS[name] in LEVELS
    text = import_module(f"paceline.checks.{name}").__doc__ or ""
    assert "?" in text.splitlines()[0]
    assert "Fails when:" in text or "Warns when:" in text


@each_case("name", [name for name in CHECKS if load(name).probe is not None])
def test_says_unknown_when_its_probe_fails(name: str) -> None:
    survey = replace(changed(healthy(), {}), failures={name: "no answer in time"})
    (found,) = [finding for finding in evaluate(survey, "full") if finding.check == name]
    assert found.outcome == "unknown"
    assert "no answer in time" in found.message


def test_every_file_is_registered() -> None:
    files = {path.stem for path in SOURCE.glob("*.py")} - NOT_CHECKS
    assert files == set(CHECKS)


def test_healthy_hosts_are_called_healthy() -> None:
    found = evaluate(changed(healthy(), {}), "full")
    assert {finding.outcome for finding in found} == {"pass"}
    assert runner.exit_status(found) == 0
    assert runner.conclusion(found).startswith("all is well")


def test_a_lone_host_needs_no_network() -> None:
    survey = changed(healthy(), {})
    alone = replace(
        survey, hosts=survey.hosts[:1], facts={"n1": survey.facts["n1"]}, evidence={}, networks={}
    )
    assert {f.outcome for f in evaluate(alone, "facts")} == {"pass"}
    assert not applies(load("ports"), alone)


def test_refused_hosts_do_not_silence_the_others() -> None:
    change = {"refusals": {"n2": {"cause": "refused", "found": "x", "remedy": "y"}}}
    found = evaluate(changed(healthy(), {**change, "-facts.n2": None, "evidence": {}}), "facts")
    assert found[0].outcome == "fail"
    assert [f for f in found if f.check == "torch" and f.outcome == "pass"]


def test_one_machine_under_two_names_is_not_told_to_take_another_name() -> None:
    survey = changed(healthy(), {})
    twins = replace(survey, facts={**survey.facts, "n2": survey.facts["n1"]})
    assert [f.outcome for f in load("names").evaluate(twins)] == ["pass"]


def test_a_scene_survives_json() -> None:
    survey = changed(healthy(), {})
    assert Survey.from_json(json.loads(json.dumps(survey.to_json()))) == survey


def test_a_failure_needs_a_remedy() -> None:
    with pytest.raises(ValueError, match="without a remedy"):
        Finding("x", "fail", (), "bad")


@each_case("path", CASES, ids=case_id)
def test_remedies_that_are_commands_can_be_read_by_a_shell(path: Path) -> None:
    case = json.loads(path.read_text())
    for finding in load(path.parent.name).evaluate(changed(healthy(), case["change"])):
        for line in finding.remedy.splitlines():
            if ": sudo " in line or ": sed " in line:
                shlex.split(line.partition(": ")[2])
