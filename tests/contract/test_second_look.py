"""What ``make test`` says of tests that pass only when they are run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "second_look.py"
TESTS = """
from pathlib import Path
import pytest

def first(name):
    mark = Path(__file__).with_name(name)
    there = mark.exists()
    mark.touch()
    return not there

@pytest.fixture
def unsteady_setup():
    assert not first("setup")

@pytest.fixture
def unsteady_end():
    yield
    assert not first("end")

def test_well(): pass
def test_in_itself(): assert not first("itself")
def test_in_its_setup(unsteady_setup): pass
def test_in_its_end(unsteady_end): pass
def test_broken(): assert BROKEN

@pytest.mark.parametrize("n", range(MANY))
def test_many(n): assert False
"""


def look(folder: Path, broken: bool = False, many: int = 0, *more: str) -> tuple[int, list[str]]:
    """The exit status, and what was said beside pytest's words."""
    text = TESTS.replace("BROKEN", str(not broken)).replace("MANY", str(many))
    (folder / "test_them.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    argv = [sys.executable, SCRIPT, *more, "test_them.py"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # for its speed
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    said = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("unsteady", "a second", "they"))
    ]
    return done.returncode, [*said, *(line for line in done.stdout.splitlines() if "too" in line)]


@pytest.mark.parametrize(
    "more", [(), ("-p", "xdist", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")]
)
def test_who_passes_at_the_second_try_is_named(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Wherever it failed at the first: in itself, before it and after it."""
    status, said = look(tmp_path, False, 0, *more)
    assert status == 0
    assert said[0] == "a second look at 3 of them, alone"
    assert said[1:4] == [
        f"unsteady: test_them.py::test_in_its{end}" for end in ("_end", "_setup", "elf")
    ]
    assert "a fault to be mended" in said[4]


def test_who_fails_twice_fails_the_run(tmp_path: Path) -> None:
    status, said = look(tmp_path, broken=True)
    assert status == 1
    assert [line for line in said if "broken" in line] == []
    assert len(said) == 5


def test_many_failures_are_not_repeated(tmp_path: Path) -> None:
    status, said = look(tmp_path, many=3)
    assert (status, said) == (1, ["6 tests failed: too many for a second look"])


def test_what_is_no_failure_of_a_test_is_not_repeated(tmp_path: Path) -> None:
    assert look(tmp_path, False, 0, "-k", "nobody") == (5, [])
