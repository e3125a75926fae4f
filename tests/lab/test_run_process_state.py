"""Tests that a rank's process looks and behaves as under ``python script.py``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launches import paceline, project_at

# further ways to exit, without a launcher, are in tests/unit/test_agent_rank_exit.py
SCRIPTS = {
    "os": ("import os; print('x'); os._exit(5)", 5, ""),
    "large": ("import sys; sys.exit(256 + 9)", 9, ""),
    "syntax": ("def broken(:\n", 1, "SyntaxError"),
    "thread": ("import threading\nt = threading.Thread(target=lambda: 1/0)\nt.start(); t.join()\n",
               0, "ZeroDivisionError"),
    "hook": ("import sys\nsys.excepthook = lambda *a: print('hooked', file=sys.stderr)\n1/0\n",
             1, "hooked"),
    "interrupt": ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    "chain": ("try:\n    1/0\nexcept ArithmeticError as e:\n    raise ValueError('second') from e",
              1, "direct cause"),
    "group": ("import sys\nraise RuntimeError('ü' * 20000)", 1, "RuntimeError"),
}  # fmt: skip


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    directory = str(folder.parent / "run")
    return paceline("run", "--run-dir", directory, "--no-torch", *words, cwd=folder)


def parse_report(text: str) -> dict[str, Any]:
    line = next(line for line in text.splitlines() if "{" in line)
    report: dict[str, Any] = json.loads(line[line.index("{") :])
    return report


def restore_default_signals() -> None:
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)


def test_rank_environment_matches_plain_python(tmp_path: Path) -> None:
    project = project_at(tmp_path / "project")
    # under nohup or in the background a child inherits ignored signals; a rank never does
    plain = subprocess.run([sys.executable, "citizen.py", "a b"], cwd=project, text=True,
                           capture_output=True, stdin=subprocess.DEVNULL,
                           preexec_fn=restore_default_signals)  # fmt: skip
    rank = run_in(project, "citizen.py", "a b")
    assert plain.returncode == rank.returncode == 3, rank.stderr
    plain_report, rank_report = parse_report(plain.stdout), parse_report(rank.stdout)
    extra_descriptors = 2  # a rank's: for events, and for the launcher's messages
    assert rank_report.pop("descriptors") <= plain_report.pop("descriptors") + extra_descriptors
    # requests a rank's collectives; a thread of its own waits for the signal
    assert rank_report.pop("blocked") == [*plain_report.pop("blocked"), signal.SIGRTMAX - 4]
    assert rank_report.pop("leader") is True
    plain_report.pop("leader")
    assert rank_report == plain_report
    assert "ünïcode ✓" in rank.stdout
    assert rank.stdout.rstrip().endswith("at exit")


@pytest.mark.parametrize("name", SCRIPTS)
def test_exit_status_and_stderr(tmp_path: Path, name: str) -> None:
    text, code, words = SCRIPTS[name]
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.py").write_text(text)
    result = run_in(folder, "job.py")
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "paceline_agent" not in result.stdout + result.stderr
    assert result.stderr.count("Traceback (most recent call last)") <= 2


def test_ranks_have_different_random_state(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.py").write_text("import random, uuid; print(random.random(), uuid.uuid4())")
    result = run_in(folder, "-p", "3", "job.py")
    assert len({line.split("] ")[1] for line in result.stdout.splitlines()}) == 3


def test_runs_folder_with_main_module(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "app").mkdir(parents=True)
    (folder / "app" / "__main__.py").write_text("import sys; print('app', sys.argv[1:])")
    result = run_in(folder, "app", "x")
    assert "app ['x']" in result.stdout, result.stderr
