"""Two writers of one folder of checkpoints, for real: stopped, let go on and killed at random."""

from __future__ import annotations

import json
from pathlib import Path

import ranks

CASES = 40


def test_never_two_writers_wherever_one_is_stopped(tmp_path: Path) -> None:
    """What is checked of each case stands in ``fencing.py``."""
    script = Path(__file__).with_name("fencing.py")
    ranks.run_ok(1, [str(script), str(tmp_path), str(CASES), "7"], tmp_path)
    seen = json.loads((tmp_path / "found.json").read_text())
    assert seen["cases"] == seen["fenced"] + seen["killed"] == CASES
    assert seen["late"]  # some were stopped between their look and the renaming
