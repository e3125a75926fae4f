"""Tests the layout of findings."""

from __future__ import annotations

import io
import re

import pytest

from paceline.checks import runner
from paceline.report.findings import draw, fitting, grid, lines
from paceline.spec.finding import Finding

TITLES = ["host", "login", "interpreter", "resolution"]
ROWS = [["n1", "ok", "ok", "ok"], ["n2", "ok", "ok", "warn"]]


def test_narrow_table_is_unchanged() -> None:
    assert fitting(TITLES, ROWS, 80) == (TITLES, ROWS)


def test_wide_table_is_transposed() -> None:
    titles, rows = fitting(TITLES, ROWS, 24)
    assert titles == ["host", "n1", "n2"]
    assert rows[-1] == ["resolution", "ok", "warn"]


def test_transposes_only_if_narrower() -> None:
    tall_rows = [[f"n{number}", "ok"] for number in range(40)]
    assert fitting(["host", "a long title"], tall_rows, 10) == (["host", "a long title"], tall_rows)


def test_conclusion_appears_once_with_remedy() -> None:
    sample_findings = [
        Finding("login", "pass", ("n1",), "n1 lets us in"),
        Finding("clock", "warn", ("n1",), "n1 is 3 s ahead", "sudo chronyd -q"),
        Finding("ports", "fail", ("n2",), "n2's firewall drops", "On n2: sudo iptables -I x"),
    ]
    text = lines(runner.conclusion(sample_findings), sample_findings)
    assert text == [
        "will fail: n2's firewall drops (and 1 more warning)",
        "         → On n2: sudo iptables -I x",
        "warn     clock: n1 is 3 s ahead",
        "         → sudo chronyd -q",
    ]
    assert "ok       login: n1 lets us in" in lines(
        runner.conclusion(sample_findings), sample_findings, True
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_strips_terminal_control_sequences(out: io.StringIO) -> None:
    evil = "n\x1b]0;x\x07\x9b31m\u202e"
    finding = Finding("login", "fail", (evil,), f"{evil} refuses", f"ssh {evil}")
    draw([f"will fail: {evil}", *lines("", [finding])], [grid([evil], [finding])], [evil], out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # removes Paceline's own colours
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "refuses" in text


def test_long_lines_wrap_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    finding = Finding("ports", "fail", ("n1",), "word " * 30, "sudo " + "-s 10.0.0.1 " * 8)
    out = Terminal()
    draw(lines("will fail", [finding]), [], [], out)
    output_lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert max(len(line) for line in output_lines if "word" in line) <= 60
    assert any(line.count("-s 10.0.0.1") == 8 for line in output_lines)  # a command is not broken
