"""Tests that Ctrl-C during the start of the program ends it without output, with status 130."""

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


def interrupt(module: str, handler: str, *cli_args: str) -> subprocess.CompletedProcess[str]:
    """Runs the program and sends it SIGINT when it imports the module."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, module, handler, *cli_args],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("module", ["paceline.cli", "click", "paceline.cli.verb"])
def test_interrupt_during_imports_is_quiet(module: str) -> None:
    completed = interrupt(module, "default_int_handler", "--version")
    assert (completed.returncode, completed.stdout, completed.stderr) == (
        128 + signal.SIGINT,
        "",
        "",
    )


def test_interrupt_during_verb_imports_is_quiet() -> None:
    completed = interrupt("paceline.cli.verbs.hosts", "default_int_handler", "hosts", "--help")
    assert completed.returncode in (128 + signal.SIGINT, -signal.SIGINT)  # 130 in a shell
    assert (completed.stdout, completed.stderr) == ("", "")


def test_ignored_interrupt_stays_ignored() -> None:
    completed = interrupt("click", "SIG_IGN", "--version")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("paceline")
