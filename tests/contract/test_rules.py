"""What every diagnosis rule must do, over the registry and recorded logs.

``fixtures/rules/CODE/hit_N`` (a log, or a run directory) is a failure that the rule must name,
``near_N`` looks like one and is none, ``unrelated`` holds failures of other kinds.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from each_case import each_case
from paceline.explain.conclusion import conclude, to_findings
from paceline.explain.evidence import Evidence, Log
from paceline.explain.evidence_reader import from_log, from_run, read_log
from paceline.explain.rule import SECTIONS, FrontMatter, Rule, parse_page
from paceline.explain.rules import codes, load, load_all

FOLDER = Path(__file__).parents[1] / "fixtures" / "rules"
SOURCE = Path(__file__).parents[2] / "src" / "paceline" / "explain" / "rules"
HITS = sorted(FOLDER.glob("*/hit_*"))
NEARS = sorted(FOLDER.glob("*/near_*"))
UNRELATED = sorted((FOLDER / "unrelated").iterdir())
REAL = Path(__file__).parents[1] / "fixtures" / "real_logs"
ANSWERS = re.findall(
    r"^\| `(.+)\.log` \|.*\| `?([a-z-]+)`? \|$", (REAL / "README.md").read_text(), re.M
)
ALL = load_all()
PAGE = "---\n{}\n---\n\n# T\n\n" + "".join(f"## {name}\n\nx\n\n" for name in SECTIONS)


def rule_of(front: str, page: str = PAGE) -> Rule:
    return parse_page("x", page.format(front), lambda: lambda _: None)


def evidence(path: Path) -> Evidence:
    return from_run(path) if path.is_dir() else from_log(read_log(path))


def case_id(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@each_case("path", HITS, ids=case_id)
def test_is_the_conclusion_of_its_hits(path: Path) -> None:
    conclusion = conclude(evidence(path), ALL)
    assert conclusion.matches
    assert conclusion.matches[0][0].code == path.parent.name, conclusion.text


def test_a_crash_of_torchs_own_debugging_has_a_remedy_of_its_own() -> None:
    """Told by the stack, or by what ``--debug`` kept of a level that the user set."""
    stack = from_log(read_log(FOLDER / "crashed" / "hit_3.log"))
    kept = Log("n1", 0, ("[c10d] The debug level is set to DETAIL.",))
    level = replace(from_log("Segmentation fault\n"), debug=(kept,))
    other = from_log(read_log(FOLDER / "crashed" / "hit_2.log"))
    for log, told in ((stack, True), (level, True), (other, False)):
        (_, match), *_ = conclude(log, ALL).matches
        assert ("torch 2.13 crashes" in match.remedy) is told


@each_case("path", HITS, ids=case_id)
def test_no_other_cause_claims_its_hits(path: Path) -> None:
    """A symptom may be seen in many failures; a cause is one."""
    causes = [rule.code for rule in ALL if not rule.symptom and rule.match(evidence(path))]
    assert set(causes) <= {path.parent.name}


@each_case("path", NEARS, ids=case_id)
def test_is_silent_on_near_misses(path: Path) -> None:
    assert load(path.parent.name).match(evidence(path)) is None


@each_case("path", UNRELATED, ids=lambda path: path.stem)
def test_unrelated_failures_are_unknown(path: Path) -> None:
    conclusion = conclude(evidence(path), ALL)
    assert not conclusion.matches, conclusion.text
    assert to_findings(conclusion)[0].outcome == "unknown"


@each_case(("name", "answer"), ANSWERS)
def test_real_failures_of_other_programs_are_not_claimed(name: str, answer: str) -> None:
    conclusion = conclude(evidence(REAL / f"{name}.log"), ALL)
    assert [rule.code for rule, _ in conclusion.matches] == [answer] * (answer != "unknown"), (
        conclusion.text
    )


def test_every_real_log_is_judged() -> None:
    assert sorted(name for name, _ in ANSWERS) == sorted(path.stem for path in REAL.glob("*.log"))


@each_case("code", codes())
def test_has_recorded_cases(code: str) -> None:
    assert [path for path in HITS if path.parent.name == code]
    assert [path for path in NEARS if path.parent.name == code]


@each_case("code", codes())
def test_is_what_it_is_called(code: str) -> None:
    assert load(code).code == code
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)


@each_case("path", HITS, ids=case_id)
def test_says_who_where_and_what_to_do(path: Path) -> None:
    conclusion = conclude(evidence(path), ALL)
    (first, *_) = to_findings(conclusion)
    assert first.outcome == "fail"
    assert first.remedy
    assert "{" not in conclusion.text
    assert " ?" not in conclusion.text


@each_case("rule", ALL, ids=lambda rule: rule.code)
def test_its_page_has_a_heading_and_each_section_once(rule: Rule) -> None:
    page = (SOURCE / f"{rule.code}.md").read_text()
    assert re.findall(r"^#+ (.+)$", page, re.MULTILINE) == [rule.title, *SECTIONS]
    assert max(map(len, page.split("---\n", 2)[2].splitlines())) <= 100


def test_modules_are_those_of_the_rules_that_compute() -> None:
    """All others are one page."""
    modules = {path.stem.replace("_", "-") for path in SOURCE.glob("*.py")} - {"--init--"}
    pages = {path.stem for path in SOURCE.glob("*.md") if "\ncomputed: true\n" in path.read_text()}
    assert modules == pages


def test_of_two_that_are_equally_sure_the_lower_place_comes_first() -> None:
    places = [rule.place for rule in ALL]
    assert places == sorted(places)
    assert rule_of("patterns: a\nsays: b").place == FrontMatter().place >= max(places)


@pytest.mark.parametrize(
    ("front", "page", "text"),
    [
        ("patterns: a\nsays: b", PAGE.replace("## Remedy", "## Remedies"), "Remedy"),
        ("patern: a\nsays: b", PAGE, "patern"),
        ("symptom: true", PAGE, "no patterns"),
    ],
)
def test_a_page_that_helps_nobody_is_refused(front: str, page: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rule_of(front, page)


def test_the_module_is_asked_before_patterns_are_looked_for() -> None:
    asked: list[Evidence] = []
    front = "patterns: known\nsays: told\ncomputed: true"
    rule = parse_page("x", PAGE.format(front), lambda: asked.append)
    assert rule.match(from_log("error: known\n")) is not None
    assert len(asked) == 1
    assert rule.match(from_log("else\n")) is None


def test_the_first_failing_rank_speaks_before_the_others() -> None:
    text = (
        "[n1/0] FileNotFoundError: [Errno 2] No such file or directory: '/a'\n"
        "[n2/1] ModuleNotFoundError: No module named 'b'\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026\n  host      : n2\n"
        "  rank      : 1 (local_rank: 0)\n  exitcode  : 1 (pid: 12)\n"
    )
    assert conclude(from_log(text), ALL).text.startswith("rank 1 on n2: Python has no module b")


def test_words_of_several_patterns_may_share_a_name() -> None:
    patterns = "  error one (?P<n>\\d)\n  error two (?P<n>\\d)\n"
    front = f"patterns: |\n{patterns}says: '{{where}} {{n}} ({{missing}})'"
    rule = rule_of(front)
    match = rule.match(from_log("[n1/0] error two 7\n"))
    assert match is not None
    assert match.cause == "rank 0 on n1 7"


def test_an_option_of_ours_behind_the_script_is_put_where_it_belongs() -> None:
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


def test_a_script_with_relative_imports_is_started_as_a_module() -> None:
    text = (FOLDER / "relative-import" / "hit_1.log").read_text()
    rule = load("relative-import")
    for dots, folder, module in ((".", "/home/ml/proj", "vision.train"),
                                 ("..", "/home/ml", "proj.vision.train")):  # fmt: skip
        match = rule.match(from_log(text.replace("from .", f"from {dots}")))
        assert match is not None
        assert match.remedy == f"Start it as a module, in {folder}: `paceline run -m {module}`"
