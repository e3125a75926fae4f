"""How findings are laid out."""

from __future__ import annotations

from paceline.report.findings import fitting

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
