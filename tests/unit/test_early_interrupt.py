"""Ctrl-C in the first moments of the program: it ends quietly, with the status of a shell."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import importlib.abc, os, runpy, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module, handler, sys.argv[1:] = sys.argv[1], sys.argv[2], sys.argv[3:]
signal.signal(signal.SIGINT, getattr(signal, handler))
sys.meta_path.insert(0, Finder())
runpy.run_module("paceline", run_name="__main__", alter_sys=False)
"""


def interrupt(module: str, handler: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the program, which gets SIGINT when it imports a module."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, module, handler, *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("module", ["paceline.cli", "click", "paceline.cli.verb"])
def test_an_interrupt_during_the_imports_is_quiet(module: str) -> None:
    done = interrupt(module, "default_int_handler", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_an_interrupt_during_the_imports_of_a_verb_is_quiet() -> None:
    done = interrupt("paceline.cli.verbs.hosts", "default_int_handler", "hosts", "--help")
    assert done.returncode in (128 + signal.SIGINT, -signal.SIGINT)  # as a shell sees it: 130
    assert (done.stdout, done.stderr) == ("", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    done = interrupt("click", "SIG_IGN", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("paceline")
