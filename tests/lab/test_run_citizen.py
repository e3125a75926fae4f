"""A rank is what ``python script.py`` would have been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launches import paceline, project_at

# more ways, without a launcher, are in tests/unit/test_agent_rank_exit.py
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


def said(text: str) -> dict[str, Any]:
    line = next(line for line in text.splitlines() if "{" in line)
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    return found


def heeding_signals() -> None:
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)


def test_a_script_finds_what_it_would_find_without_us(tmp_path: Path) -> None:
    project = project_at(tmp_path / "project")
    # under nohup or in the background a child inherits ignored signals; a rank never does
    plain = subprocess.run([sys.executable, "citizen.py", "a b"], cwd=project, text=True,
                           capture_output=True, stdin=subprocess.DEVNULL,
                           preexec_fn=heeding_signals)  # fmt: skip
    rank = run_in(project, "citizen.py", "a b")
    assert plain.returncode == rank.returncode == 3, rank.stderr
    theirs, ours = said(plain.stdout), said(rank.stdout)
    more = 2  # ours: for events, and for the launcher's word
    assert ours.pop("descriptors") <= theirs.pop("descriptors") + more
    # one that nobody uses: by it a rank is asked for its collectives, in a thread of its own
    assert ours.pop("blocked") == [*theirs.pop("blocked"), signal.SIGRTMAX - 4]
    assert ours.pop("leader") is True
    theirs.pop("leader")
    assert ours == theirs
    assert "ünïcode ✓" in rank.stdout
    assert rank.stdout.rstrip().endswith("at exit")


@pytest.mark.parametrize("name", SCRIPTS)
def test_ways_to_leave(tmp_path: Path, name: str) -> None:
    text, code, words = SCRIPTS[name]
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.py").write_text(text)
    done = run_in(folder, "job.py")
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "paceline_agent" not in done.stdout + done.stderr
    assert done.stderr.count("Traceback (most recent call last)") <= 2


def test_ranks_do_not_share_their_randomness(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.py").write_text("import random, uuid; print(random.random(), uuid.uuid4())")
    done = run_in(folder, "-p", "3", "job.py")
    assert len({line.split("] ")[1] for line in done.stdout.splitlines()}) == 3


def test_folders_and_archives_run_too(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "app").mkdir(parents=True)
    (folder / "app" / "__main__.py").write_text("import sys; print('app', sys.argv[1:])")
    done = run_in(folder, "app", "x")
    assert "app ['x']" in done.stdout, done.stderr
