"""Tests what every rule for diagnosis must do, on all rules and recorded logs.

``fixtures/rules/CODE/hit_N`` (a log, or a run directory) is a failure that the rule must find,
``near_N`` is similar but no such failure, and ``unrelated`` has failures of other kinds.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from each_case import each_case
from paceline.explain.conclusion import conclude, to_findings
from paceline.explain.evidence import Evidence, Log
from paceline.explain.evidence_reader import from_log, from_run, read_log
from paceline.explain.rule import SECTIONS, FrontMatter, Rule, _parse_front_matter, parse_page
from paceline.explain.rules import codes, load, load_all

FOLDER = Path(__file__).parents[1] / "fixtures" / "rules"
SOURCE = Path(__file__).parents[2] / "src" / "paceline" / "explain" / "rules"
HITS = sorted(FOLDER.glob("*/hit_*"))
NEAR_MISSES = sorted(FOLDER.glob("*/near_*"))
UNRELATED = sorted((FOLDER / "unrelated").iterdir())
REAL_LOGS = Path(__file__).parents[1] / "fixtures" / "real_logs"
ANSWERS = re.findall(
    r"^\| `(.+)\.log` \|.*\| `?([a-z-]+)`? \|$", (REAL_LOGS / "README.md").read_text(), re.M
)
RULES = load_all()
PAGE = "---\n{}\n---\n\n# T\n\n" + "".join(f"## {name}\n\nx\n\n" for name in SECTIONS)


def rule_of(front: str, page: str = PAGE) -> Rule:
    return parse_page("x", page.format(front), lambda: lambda _: None)


def evidence(path: Path) -> Evidence:
    return from_run(path) if path.is_dir() else from_log(read_log(path))


def case_id(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@each_case("path", HITS, ids=case_id)
def test_hits_match_rule(path: Path) -> None:
    conclusion = conclude(evidence(path), RULES)
    assert conclusion.matches
    assert conclusion.matches[0][0].code == path.parent.name, conclusion.text


def test_crash_by_torch_debugging_has_specific_remedy() -> None:
    """Recognised by the stack, or by the level of debugging in what ``--debug`` has recorded."""
    stack = from_log(read_log(FOLDER / "crashed" / "hit_3.log"))
    debug_log = Log("n1", 0, ("[c10d] The debug level is set to DETAIL.",))
    level = replace(from_log("Segmentation fault\n"), debug=(debug_log,))
    plain_crash = from_log(read_log(FOLDER / "crashed" / "hit_2.log"))
    for log, expected in ((stack, True), (level, True), (plain_crash, False)):
        (_, match), *_ = conclude(log, RULES).matches
        assert ("torch 2.13 crashes" in match.remedy) is expected


@each_case("path", HITS, ids=case_id)
def test_hits_match_no_second_cause(path: Path) -> None:
    """Several rules may match a symptom, but only one rule a cause."""
    found = evidence(path)
    causes = [rule.code for rule in RULES if not rule.symptom and rule.match(found)]
    assert set(causes) <= {path.parent.name}


@each_case("path", NEAR_MISSES, ids=case_id)
def test_near_misses_do_not_match(path: Path) -> None:
    assert load(path.parent.name).match(evidence(path)) is None


@each_case("path", UNRELATED, ids=lambda path: path.stem)
def test_unrelated_failures_are_unknown(path: Path) -> None:
    conclusion = conclude(evidence(path), RULES)
    assert not conclusion.matches, conclusion.text
    assert to_findings(conclusion)[0].outcome == "unknown"


@each_case(("name", "answer"), ANSWERS)
def test_real_logs_match_expected_rule(name: str, answer: str) -> None:
    conclusion = conclude(evidence(REAL_LOGS / f"{name}.log"), RULES)
    assert [rule.code for rule, _ in conclusion.matches] == [answer] * (answer != "unknown"), (
        conclusion.text
    )


def test_readme_lists_real_logs() -> None:
    assert sorted(name for name, _ in ANSWERS) == sorted(
        path.stem for path in REAL_LOGS.glob("*.log")
    )


@each_case("code", codes())
def test_has_recorded_cases(code: str) -> None:
    assert [path for path in HITS if path.parent.name == code]
    assert [path for path in NEAR_MISSES if path.parent.name == code]


@each_case("code", codes())
def test_code_is_valid(code: str) -> None:
    assert load(code).code == code
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)


@each_case("path", HITS, ids=case_id)
def test_finding_has_remedy_and_no_placeholders(path: Path) -> None:
    conclusion = conclude(evidence(path), RULES)
    (first, *_) = to_findings(conclusion)
    assert first.outcome == "fail"
    assert first.remedy
    assert "{" not in conclusion.text
    assert " ?" not in conclusion.text


@each_case("rule", RULES, ids=lambda rule: rule.code)
def test_page_has_title_and_sections(rule: Rule) -> None:
    page = (SOURCE / f"{rule.code}.md").read_text()
    assert re.findall(r"^#+ (.+)$", page, re.MULTILINE) == [rule.title, *SECTIONS]
    assert max(map(len, page.split("---\n", 2)[2].splitlines())) <= 100


@each_case("code", codes())
def test_front_matter_is_parsed_as_yaml(code: str) -> None:
    front = (SOURCE / f"{code}.md").read_text().split("---\n", 2)[1]
    assert _parse_front_matter(front) == yaml.safe_load(front)


def test_modules_match_computed_rules() -> None:
    """All other rules consist of one page."""
    modules = {path.stem.replace("_", "-") for path in SOURCE.glob("*.py")} - {"--init--"}
    pages = {path.stem for path in SOURCE.glob("*.md") if "\ncomputed: true\n" in path.read_text()}
    assert modules == pages


def test_rules_are_sorted_by_place() -> None:
    places = [rule.place for rule in RULES]
    assert places == sorted(places)
    assert rule_of("patterns: 'a'\nsays: 'b'").place == FrontMatter().place >= max(places)


@pytest.mark.parametrize(
    ("front", "page", "text"),
    [
        ("patterns: 'a'\nsays: 'b'", PAGE.replace("## Remedy", "## Remedies"), "Remedy"),
        ("patern: 'a'\nsays: 'b'", PAGE, "patern"),
        ("symptom: true", PAGE, "no patterns"),
        ("patterns: a\nsays: 'b'", PAGE, "rule x: "),  # a text without quotation marks
    ],
)
def test_rejects_invalid_page(front: str, page: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rule_of(front, page)


def test_computed_rule_calls_module() -> None:
    calls: list[Evidence] = []
    front = "patterns: 'known'\nsays: 'told'\ncomputed: true"
    rule = parse_page("x", PAGE.format(front), lambda: calls.append)
    assert rule.match(from_log("error: known\n")) is not None
    assert len(calls) == 1
    assert rule.match(from_log("else\n")) is None


def test_cause_of_first_failing_rank_wins() -> None:
    text = (
        "[n1/0] FileNotFoundError: [Errno 2] No such file or directory: '/a'\n"
        "[n2/1] ModuleNotFoundError: No module named 'b'\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026\n  host      : n2\n"
        "  rank      : 1 (local_rank: 0)\n  exitcode  : 1 (pid: 12)\n"
    )
    assert conclude(from_log(text), RULES).text.startswith("rank 1 on n2: Python has no module b")


def test_patterns_may_share_group_names() -> None:
    patterns = "  error one (?P<n>\\d)\n  error two (?P<n>\\d)\n"
    front = f"patterns: |\n{patterns}says: '{{where}} {{n}} ({{missing}})'"
    rule = rule_of(front)
    match = rule.match(from_log("[n1/0] error two 7\n"))
    assert match is not None
    assert match.cause == "rank 0 on n1 7"


def test_remedy_moves_paceline_option_before_script() -> None:
    from paceline.cli.verbs.run import command
    from paceline.explain.rules.wrong_arguments import PACELINE_OPTIONS, match

    assert {flag for option in command.params for flag in option.opts} >= PACELINE_OPTIONS
    log = Log.from_text("n1", 0, "usage: x\ntrain.py: error: unrecognized arguments: -H a,b\n")
    conclusion = match(Evidence((log,)))
    assert conclusion is not None
    assert "before the script: `paceline run -H a,b train.py`, with your" in conclusion.remedy
    assert "the script's own arguments after its name" in conclusion.remedy
    log = Log.from_text("n1", 0, "train.py: error: unrecognized arguments: --learning_rate 1\n")
    assert match(Evidence((log,))) is None


def test_remedy_starts_relative_imports_as_module() -> None:
    text = (FOLDER / "relative-import" / "hit_1.log").read_text()
    rule = load("relative-import")
    for dots, folder, module in ((".", "/home/ml/proj", "vision.train"),
                                 ("..", "/home/ml", "proj.vision.train")):  # fmt: skip
        match = rule.match(from_log(text.replace("from .", f"from {dots}")))
        assert match is not None
        assert match.remedy == f"Start it as a module, in {folder}: `paceline run -m {module}`"
