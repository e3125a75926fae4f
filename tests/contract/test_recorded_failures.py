"""Tests the rule and cause found for logs of real trainings that failed under real launchers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from each_case import each_case
from paceline.explain.conclusion import conclude
from paceline.explain.evidence_reader import from_log
from paceline.explain.rules import load_all

FOLDER = Path(__file__).parents[1] / "fixtures" / "recorded_failures"
CASES = re.findall(
    r"^\| `([\w-]+)` \|.*\| `([a-z-]+)` \| (.+) \|$", (FOLDER / "README.md").read_text(), re.M
)
RULES = load_all()
PREFIXES: dict[str, Callable[[str], str]] = {
    "runtime": lambda line: f"2026-11-26T10:00:01.123456789Z stderr F {line}",
    "compose": lambda line: f"trainer-2  | {line}",
    "json": lambda line: json.dumps({"log": f"{line}\n", "stream": "stderr"}),
}


@each_case(("name", "rule", "cause"), CASES)
def test_recorded_failures_have_expected_cause(name: str, rule: str, cause: str) -> None:
    conclusion = conclude(from_log((FOLDER / f"{name}.log").read_text()), RULES)
    assert [rule.code for rule, _ in conclusion.matches][:1] == [rule]
    assert cause in conclusion.text


@pytest.mark.parametrize("prefix", PREFIXES)
def test_log_prefixes_do_not_change_rule(prefix: str) -> None:
    codes = {}
    for name, _, _ in CASES:
        lines = map(PREFIXES[prefix], (FOLDER / f"{name}.log").read_text().splitlines())
        matches = conclude(from_log("\n".join(lines)), RULES).matches
        codes[name] = matches[0][0].code if matches else ""
    assert codes == {name: rule for name, rule, _ in CASES}


def test_readme_lists_recorded_failures() -> None:
    assert sorted(case[0] for case in CASES) == sorted(path.stem for path in FOLDER.glob("*.log"))
