"""A run on a terminal: what a person sees and types."""

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


def test_a_run_is_watched_and_stopped_by_keys(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "paceline", "run", "--no-torch", "-p", "2", "--run-dir", "run"]
    with on_terminal([*words, "talk.py"], cwd=tmp_path) as one:
        assert one.reads(ENTER, 60)
        assert one.reads(b"2 ranks on 1 host")
        assert one.reads(b"running")
        one.types(b"1")
        assert one.reads(b"log of rank 1 on")
        one.types(b"t")
        assert one.reads(b"stacks (up and down")
        one.types(b"\x1b")
        one.types(b"x")
        assert one.reads(b"stop the run?")
        one.types(b"y")
        assert one.ends() == 143
        assert one.restored
    screen, after = one.said.rsplit(LEAVE, 1)
    assert b"line 0 of rank 0" in screen.split(ENTER, 1)[0] + after
    assert b"SIGTERM: stopping" in after
    assert b"paceline: stopped by SIGTERM: run" in after
    assert list((tmp_path / "run" / "stacks").iterdir())
