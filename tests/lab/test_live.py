"""Tests what a user sees and types on the terminal of a run."""

from __future__ import annotations

import sys
from pathlib import Path

from terminals import ENTER, LEAVE, on_terminal

SCRIPT = """
import os, time
for number in range(600):
    print(f"line {number} of rank {os.environ['RANK']}", flush=True)
    time.sleep(0.2)
"""


def test_live_view_shows_run_and_stops_it_by_keys(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--no-torch", "-p", "2", "--run-dir", "run"]
    with on_terminal([*command, "talk.py"], cwd=tmp_path) as terminal:
        assert terminal.reads(ENTER, 60)
        assert terminal.reads(b"2 ranks on 1 host")
        assert terminal.reads(b"running")
        terminal.types(b"1")
        assert terminal.reads(b"log of rank 1 on")
        terminal.types(b"t")
        assert terminal.reads(b"stacks (up and down")
        terminal.types(b"\x1b")
        terminal.types(b"x")
        assert terminal.reads(b"stop the run?")
        terminal.types(b"y")
        assert terminal.ends() == 143
        assert terminal.restored
    screen, after = terminal.said.rsplit(LEAVE, 1)
    assert b"line 0 of rank 0" in screen.split(ENTER, 1)[0] + after
    assert b"SIGTERM: stopping" in after
    assert b"paceline: stopped by SIGTERM: run" in after
    assert list((tmp_path / "run" / "stacks").iterdir())
