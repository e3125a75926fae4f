"""Tests the formats of durations and rates, and the names for the parts of a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline
from each_case import each_case
from paceline.spec.events import PART_NAMES, PARTS
from paceline.spec.formatting import (
    closest_match,
    format_bit_rate,
    format_duration,
    format_duration_short,
    format_time,
)


@each_case(
    ("seconds", "said", "rough"),
    [
        (0, "0 s", "0 s"), (0.00012, "0.12 ms", "0 s"), (0.0082345, "8.23 ms", "0 s"),
        (0.0999, "99.9 ms", "0 s"), (0.09999, "0.1 s", "0 s"), (0.1834, "0.183 s", "0 s"),
        (0.9996, "1 s", "0 s"), (3.44, "3.4 s", "3 s"), (9.96, "10 s", "9 s"),
        (42.4, "42 s", "42 s"), (99.6, "1 min 40 s", "1 min"), (119.7, "2 min", "1 min"),
        (3599.7, "1 h", "59 min"), (7199, "2 h", "1 h"), (7200, "2 h", "2 h"),
        (4000, "1 h 7 min", "1 h"), (7500, "2 h 5 min", "2 h"),
        (100_000, "27 h 47 min", "1 d"),
        (172_799, "2 d", "1 d"), (276_000, "3 d 5 h", "3 d"),
        (-1, "0 s", "0 s"),
    ],
)  # fmt: skip
def test_format_duration(seconds: float, said: str, rough: str) -> None:
    assert (format_duration(seconds), format_duration_short(seconds)) == (said, rough)


@pytest.mark.parametrize(
    ("rate", "said"),
    [(12, "12 bit/s"), (999.6, "1 kbit/s"), (2.5e6, "2.5 Mbit/s"), (940e6, "940 Mbit/s"),
     (999.6e6, "1 Gbit/s"), (4e10, "40 Gbit/s"), (3.2e12, "3.2 Tbit/s")],
)  # fmt: skip
def test_rates(rate: float, said: str) -> None:
    assert format_bit_rate(rate) == said


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NPROC", "NPROC_PER_NODE"), ("GRACEE", "GRACE"), ("gr", ""), ("xyz", "")],
)
def test_closest_match_prefers_completions(name: str, expected: str) -> None:
    assert closest_match(name, ["GRACE", "NPROC_PER_NODE_X", "NPROC_PER_NODE"]) == expected


def test_step_part_names_are_defined_once() -> None:
    """No other file of the package has its own table of names for users."""
    assert PARTS == ("data", "computing", "waiting", "moving", "saving", "other")
    package = Path(paceline.__file__).parent
    table = re.compile(
        r"""["']?(waiting|moving|saving)["']?: ["'](?![-#.=+·═░▒▓█]["'])[a-z ]+["']"""
    )
    tables = [path.relative_to(package).as_posix() for path in package.rglob("*.py")
              if len(table.findall(path.read_text(encoding="utf-8"))) > 1
              and "launch/terminal/render.py" not in path.as_posix()]  # fmt: skip
    assert tables == ["spec/events.py"]
    assert len(set(PART_NAMES.values())) == len(PARTS)


@pytest.mark.parametrize("utc", [False, True])
def test_format_time_accepts_impossible_times(utc: bool) -> None:
    assert format_time(86399, "%F %H:%M:%S", utc=True) == "1970-01-01 23:59:59"
    for seconds in (1e18, -1e18, 1e308, float("nan"), float("inf"), 2**63, 2**62):
        assert format_time(seconds, utc=utc) == "?"


def test_times_are_formatted_by_one_function() -> None:
    """``localtime`` raises errors for times that a hostile host may send."""
    package = Path(paceline.__file__).parent
    names = ("localtime(", "gmtime(", "fromtimestamp(")
    users = [path for path in package.rglob("*.py")
             if any(name in path.read_text(encoding="utf-8") for name in names)]  # fmt: skip
    assert [path.name for path in users] == []
