"""No line that a rank, a node or a log can bring makes one of our patterns take long.

Every compiled pattern of the modules that read foreign text is fed with repetitions of its own
beginnings, the way a backtracking search is made to take quadratic time or worse.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline.checks
from each_case import each_case
from paceline.explain.conclusion import conclude
from paceline.explain.evidence_reader import from_log
from paceline.explain.libraries import FACTS
from paceline.explain.rules import codes, load, load_all
from paceline.remote.openssh import CAUSES
from paceline.schedulers import mpi, slurm

CHARS = 40_000  # twenty times the longest line that rules see
BOUND_S = 3.0  # of CPU time; a linear pattern takes hundredths, a quadratic one some seconds
SHORT_CHARS = 2_000  # what takes BOUND_S for CHARS and is quadratic takes BOUND_S / 400 for these
SHORT_BOUND_S = BOUND_S / 600
EVERYWHERE = ["a", "a@", "@a", "a.", "a:", ": ", " ", "0", "(", "[", "[0]", "/", "-", "-a", "'",
              '"', "=", "a=", "://", "\x1b[", "\x1b]"]  # fmt: skip
READERS = [
    "paceline.explain.evidence_reader", "paceline.explain.stacks", "paceline.explain.rule",
    "paceline.explain.prefixes", "paceline.explain.unit_parser", "paceline.explain.line_kinds",
    "paceline.explain.exit_reports", "paceline.explain.outcome", "paceline.explain.documents",
    "paceline.launch.failure_analysis", "paceline.launch.terminal.screen", "paceline.report.bundle",
    "paceline.spec.failure", "paceline.spec.libraries", "paceline.explain.libraries",
    "paceline.spec.terminal", "paceline.remote.openssh",
    "paceline.launch.nodes.fleet", "paceline.schedulers.mpi", "paceline.schedulers.slurm",
    "paceline.schedulers.container",
    *(f"paceline.checks.{found.name}" for found in pkgutil.iter_modules(paceline.checks.__path__)),
]  # fmt: skip


def flat(value: object) -> Iterator[re.Pattern[str]]:
    """The patterns in a constant: itself, or those in its tables."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from flat(part)


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    for code in codes():
        for way in inspect.getclosurevars(load(code).match).nonlocals["matchers"]:
            known = inspect.getclosurevars(way).nonlocals | vars(inspect.getmodule(way))
            for name, value in known.items():
                if isinstance(value, re.Pattern):
                    yield f"{code}.{name}", value
    for module in READERS:
        for name, value in vars(importlib.import_module(module)).items():
            for part in flat(value):
                yield f"{module}.{name}", part
    for library, what, pattern in FACTS:
        yield f"FACTS.{library} {what}", pattern
    for cause in CAUSES:
        yield f"CAUSES.{cause.name}", re.compile(cause.pattern)
    tables = [*mpi._VERSIONS, *mpi._CAUSES, *slurm._CAUSES]
    for number, table in enumerate(tables):  # in one of them the name comes first
        pattern = table[1] if len(table) == 2 else table[0]
        yield f"schedulers.{number}", re.compile(pattern, re.DOTALL)
    # written where they are used
    for module in READERS:
        source = Path(importlib.import_module(module).__file__ or "").read_text()
        for raw in re.findall(r're\.(?:search|match|fullmatch|sub|findall)\(\s*r"([^"]+)"', source):
            yield f"{module}: {raw}", re.compile(raw)


ALL = list(patterns())


def beginnings(pattern: re.Pattern[str]) -> set[str]:
    """Pieces of text that bring a search some way into the pattern, again and again."""
    literal = re.findall(r"[A-Za-z0-9@ :'\"(/\[.=-]{2,}", pattern.pattern.replace("\\", ""))
    return {*EVERYWHERE, *literal, *(f"{one}{more}" for one in literal for more in ("x", " ", "0"))}


@each_case("pattern", list(dict.fromkeys(pattern for _, pattern in ALL)))
def test_takes_time_in_proportion_to_the_line(pattern: re.Pattern[str]) -> None:
    for piece in sorted(beginnings(pattern)):
        if search_time_s(pattern, piece, SHORT_CHARS) > SHORT_BOUND_S:
            assert search_time_s(pattern, piece, CHARS) < BOUND_S, (piece, pattern.pattern)


def search_time_s(pattern: re.Pattern[str], piece: str, chars: int) -> float:
    """CPU time of a search in a line of so many characters, made of a repeated piece."""
    line = (piece * (chars // len(piece) + 1))[:chars] + "!"
    began = time.process_time()
    pattern.search(line)
    return time.process_time() - began


def test_a_pattern_that_backtracks_is_noticed() -> None:
    """In the short line already, which decides whether the long one is searched."""
    backtracks = re.compile(r"(\w+)@")
    assert search_time_s(backtracks, "a", SHORT_CHARS) > SHORT_BOUND_S


@pytest.mark.parametrize(
    "piece",
    ["a@b ", "@S0",
     "Root Cause (first observed failure):", "Root Cause (first observed failure):\n",
     "host      : n1 ", "x", "ssh: ", "[n1/0] ", "Traceback (most recent call last):\n"],
)  # fmt: skip
def test_a_huge_hostile_log_is_explained_soon(piece: str) -> None:
    began = time.process_time()
    conclude(from_log(piece * (320_000 // len(piece))), load_all())
    assert time.process_time() - began < 20
