"""What every diagnosis rule must do, over the registry and recorded logs.

``fixtures/rules/CODE/hit_N`` (a log, or a run directory) is a failure that the rule must name,
``near_N`` looks like one and is none, ``unrelated`` holds failures of other kinds.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.explain.conclude import conclude, to_findings
from paceline.explain.evidence import Evidence
from paceline.explain.gather import from_log, from_run, read
from paceline.explain.pages import page
from paceline.explain.rule import define, in_log
from paceline.explain.rules import RULES, load, load_all

FOLDER = Path(__file__).parents[1] / "fixtures" / "rules"
SOURCE = Path(__file__).parents[2] / "src" / "paceline" / "explain" / "rules"
PAGES = Path(__file__).parents[2] / "docs" / "rules"
HITS = sorted(FOLDER.glob("*/hit_*"))
NEARS = sorted(FOLDER.glob("*/near_*"))
UNRELATED = sorted((FOLDER / "unrelated").iterdir())
REAL = Path(__file__).parents[1] / "fixtures" / "real_logs"
ANSWERS = re.findall(
    r"^\| `(.+)\.log` \|.*\| `?([a-z-]+)`? \|$", (REAL / "README.md").read_text(), re.M
)
ALL = load_all()


def evidence(path: Path) -> Evidence:
    return from_run(path) if path.is_dir() else from_log(read(path))


def case_id(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", HITS, ids=case_id)
def test_is_the_conclusion_of_its_hits(path: Path) -> None:
    found = conclude(evidence(path), ALL)
    assert found.known
    assert found.found[0][0].code == path.parent.name, found.text


@pytest.mark.parametrize("path", HITS, ids=case_id)
def test_no_other_cause_claims_its_hits(path: Path) -> None:
    """A symptom may be seen in many failures; a cause is one."""
    causes = [rule.code for rule in ALL if not rule.symptom and rule.match(evidence(path))]
    assert set(causes) <= {path.parent.name}


@pytest.mark.parametrize("path", NEARS, ids=case_id)
def test_is_silent_on_near_misses(path: Path) -> None:
    assert load(path.parent.name).match(evidence(path)) is None


@pytest.mark.parametrize("path", UNRELATED, ids=lambda path: path.stem)
def test_unrelated_failures_are_unknown(path: Path) -> None:
    found = conclude(evidence(path), ALL)
    assert not found.known, found.text
    assert to_findings(found)[0].outcome == "unknown"


@pytest.mark.parametrize(("name", "answer"), ANSWERS)
def test_real_failures_of_other_programs_are_not_claimed(name: str, answer: str) -> None:
    found = conclude(evidence(REAL / f"{name}.log"), ALL)
    assert [rule.code for rule, _ in found.found] == [answer] * (answer != "unknown"), found.text


def test_every_real_log_is_judged() -> None:
    assert sorted(name for name, _ in ANSWERS) == sorted(path.stem for path in REAL.glob("*.log"))


@pytest.mark.parametrize("code", RULES)
def test_has_recorded_cases(code: str) -> None:
    assert [path for path in HITS if path.parent.name == code]
    assert [path for path in NEARS if path.parent.name == code]


@pytest.mark.parametrize("code", RULES)
def test_is_what_it_is_called(code: str) -> None:
    rule = load(code)
    assert rule.code == code
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
    assert RULES[code].endswith(code.replace("-", "_"))


@pytest.mark.parametrize("path", HITS, ids=case_id)
def test_says_who_where_and_what_to_do(path: Path) -> None:
    found = conclude(evidence(path), ALL)
    (first, *_) = to_findings(found)
    assert first.outcome == "fail"
    assert first.remedy
    assert "{" not in found.text
    assert " ?" not in found.text


@pytest.mark.parametrize("code", RULES)
def test_its_page_is_up_to_date(code: str) -> None:
    assert (PAGES / f"{code}.md").read_text() == page(load(code)), (
        "python -m paceline.explain.pages"
    )


def test_there_are_no_other_pages_or_files() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*RULES, "README"}
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__"}
    assert modules == {code.replace("-", "_") for code in RULES}


def test_a_rule_without_remedy_is_refused() -> None:
    with pytest.raises(ValueError, match="Remedy"):
        define("x", "Title.\n\nMeaning: a\nCause: b\nConfirm: c\nSource: d", lambda _: None)


def test_the_first_failing_rank_speaks_before_the_others() -> None:
    text = (
        "[n1/0] FileNotFoundError: [Errno 2] No such file or directory: '/a'\n"
        "[n2/1] ModuleNotFoundError: No module named 'b'\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026\n  host      : n2\n"
        "  rank      : 1 (local_rank: 0)\n  exitcode  : 1 (pid: 12)\n"
    )
    assert conclude(from_log(text), ALL).text.startswith("rank 1 on n2: Python has no module b")


def test_words_of_several_patterns_may_share_a_name() -> None:
    doc = "T.\n\nMeaning: a\nCause: b\nConfirm: c\nRemedy: d\nSource: e"
    rule = in_log("x", doc, [r"one (?P<n>\d)", r"two (?P<n>\d)"], "{where} {n} ({missing})")
    match = rule.match(from_log("[n1/0] two 7\n"))
    assert match is not None
    assert match.cause == "rank 0 on n1 7"
