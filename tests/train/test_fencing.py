"""Tests two writers of one folder of checkpoints, stopped, continued or killed at random."""

from __future__ import annotations

import json
from pathlib import Path

import local_ranks

CASES = 40


def test_fencing_prevents_concurrent_writers(tmp_path: Path) -> None:
    """The assertions about each case are in ``fencing_worlds.py``."""
    script = Path(__file__).with_name("fencing_worlds.py")
    local_ranks.run_ok(1, [str(script), str(tmp_path), str(CASES), "7"], tmp_path)
    counts = json.loads((tmp_path / "found.json").read_text())
    assert counts["cases"] == counts["fenced"] + counts["killed"] == CASES
    assert counts["late"]  # some were stopped between the check and the renaming
