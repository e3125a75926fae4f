"""How findings are laid out."""

from __future__ import annotations

import io
import re

import pytest

from paceline.checks import runner
from paceline.report.findings import draw, fitting, grid, lines
from paceline.spec.finding import Finding

TITLES = ["host", "login", "interpreter", "resolution"]
ROWS = [["n1", "ok", "ok", "ok"], ["n2", "ok", "ok", "warn"]]


def test_a_table_that_fits_stays() -> None:
    assert fitting(TITLES, ROWS, 80) == (TITLES, ROWS)


def test_a_table_that_is_too_wide_is_turned() -> None:
    titles, rows = fitting(TITLES, ROWS, 24)
    assert titles == ["host", "n1", "n2"]
    assert rows[-1] == ["resolution", "ok", "warn"]


def test_turning_must_help() -> None:
    many = [[f"n{number}", "ok"] for number in range(40)]
    assert fitting(["host", "a long title"], many, 10) == (["host", "a long title"], many)


def test_the_conclusion_is_said_once_with_what_to_do() -> None:
    found = [
        Finding("login", "pass", ("n1",), "n1 lets us in"),
        Finding("clock", "warn", ("n1",), "n1 is 3 s ahead", "sudo chronyd -q"),
        Finding("ports", "fail", ("n2",), "n2's firewall drops", "On n2: sudo iptables -I x"),
    ]
    text = lines(runner.conclusion(found), found)
    assert text == [
        "will fail: n2's firewall drops (and 1 more warning)",
        "         → On n2: sudo iptables -I x",
        "warn     clock: n1 is 3 s ahead",
        "         → sudo chronyd -q",
    ]
    assert "ok       login: n1 lets us in" in lines(runner.conclusion(found), found, True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_what_nodes_say_cannot_steer_the_terminal(out: io.StringIO) -> None:
    evil = "n\x1b]0;x\x07\x9b31m\u202e"
    finding = Finding("login", "fail", (evil,), f"{evil} refuses", f"ssh {evil}")
    draw([f"will fail: {evil}", *lines("", [finding])], [grid([evil], [finding])], [evil], out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # our own colours
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "refuses" in text


def test_long_lines_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    finding = Finding("ports", "fail", ("n1",), "word " * 30, "sudo " + "-s 10.0.0.1 " * 8)
    out = Terminal()
    draw(lines("will fail", [finding]), [], [], out)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert max(len(line) for line in shown if "word" in line) <= 60
    assert any(line.count("-s 10.0.0.1") == 8 for line in shown)  # a command stays whole
