"""Tests that no line of a rank, node or log makes one of Paceline's regular expressions slow.

Every compiled pattern in modules that read untrusted text is applied to repetitions of parts of
itself, which would make a backtracking search take quadratic time or more.
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

CHARS = 40_000  # twenty times the longest line that rules read
BOUND_S = 3.0  # CPU time; a linear pattern takes hundredths of a second, a quadratic one some
SHORT_CHARS = 2_000  # at quadratic cost, BOUND_S for CHARS is BOUND_S / 400 for these
SHORT_BOUND_S = BOUND_S / 600
COMMON_PIECES = ["a", "a@", "@a", "a.", "a:", ": ", " ", "0", "(", "[", "[0]", "/", "-", "-a", "'",
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
    *(f"paceline.checks.{info.name}" for info in pkgutil.iter_modules(paceline.checks.__path__)),
]  # fmt: skip


def nested_patterns(value: object) -> Iterator[re.Pattern[str]]:
    """Yields the patterns in a constant: the constant itself, or those in its tables."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from nested_patterns(part)


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    for code in codes():
        for matcher in inspect.getclosurevars(load(code).match).nonlocals["matchers"]:
            constants = inspect.getclosurevars(matcher).nonlocals | vars(inspect.getmodule(matcher))
            for name, value in constants.items():
                if isinstance(value, re.Pattern):
                    yield f"{code}.{name}", value
    for module in READERS:
        for name, value in vars(importlib.import_module(module)).items():
            for part in nested_patterns(value):
                yield f"{module}.{name}", part
    for library, fact, pattern in FACTS:
        yield f"FACTS.{library} {fact}", pattern
    for cause in CAUSES:
        yield f"CAUSES.{cause.name}", re.compile(cause.pattern)
    tables = [*mpi._VERSIONS, *mpi._CAUSES, *slurm._CAUSES]
    for number, table in enumerate(tables):  # in one table the name is first
        pattern = table[1] if len(table) == 2 else table[0]
        yield f"schedulers.{number}", re.compile(pattern, re.DOTALL)
    # patterns without a constant
    for module in READERS:
        source = Path(importlib.import_module(module).__file__ or "").read_text()
        for raw in re.findall(r're\.(?:search|match|fullmatch|sub|findall)\(\s*r"([^"]+)"', source):
            yield f"{module}: {raw}", re.compile(raw)


NAMED_PATTERNS = list(patterns())


def beginnings(pattern: re.Pattern[str]) -> set[str]:
    """Returns texts that match a part of the pattern when they are repeated."""
    literal = re.findall(r"[A-Za-z0-9@ :'\"(/\[.=-]{2,}", pattern.pattern.replace("\\", ""))
    return {
        *COMMON_PIECES,
        *literal,
        *(f"{prefix}{suffix}" for prefix in literal for suffix in ("x", " ", "0")),
    }


@each_case("pattern", list(dict.fromkeys(pattern for _, pattern in NAMED_PATTERNS)))
def test_pattern_takes_linear_time(pattern: re.Pattern[str]) -> None:
    for piece in sorted(beginnings(pattern)):
        if search_time_s(pattern, piece, SHORT_CHARS) > SHORT_BOUND_S:
            assert search_time_s(pattern, piece, CHARS) < BOUND_S, (piece, pattern.pattern)


def search_time_s(pattern: re.Pattern[str], piece: str, chars: int) -> float:
    """Returns the CPU time of a search in a line of ``chars`` characters that repeats ``piece``."""
    line = (piece * (chars // len(piece) + 1))[:chars] + "!"
    start = time.process_time()
    pattern.search(line)
    return time.process_time() - start


def test_detects_backtracking_pattern() -> None:
    """The short line already shows it, and decides whether the long one is searched."""
    backtracks = re.compile(r"(\w+)@")
    assert search_time_s(backtracks, "a", SHORT_CHARS) > SHORT_BOUND_S


@pytest.mark.parametrize(
    "piece",
    ["a@b ", "@S0",
     "Root Cause (first observed failure):", "Root Cause (first observed failure):\n",
     "host      : n1 ", "x", "ssh: ", "[n1/0] ", "Traceback (most recent call last):\n"],
)  # fmt: skip
def test_explains_large_hostile_log_in_time(piece: str) -> None:
    start = time.process_time()
    conclude(from_log(piece * (320_000 // len(piece))), load_all())
    assert time.process_time() - start < 20
