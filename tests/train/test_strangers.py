"""A stranger between two ranks is noticed where the kernel does not keep it away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("strangers.py")


def test_a_stranger_in_the_middle_is_named_before_anything_is_exchanged() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=140
    )
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(ranks) == 2, done.stderr
    for rank in ranks:
        assert rank["found"] == ["127.0.0.2"]
        assert "connection with 127.0.0.2, which is none of this job's hosts" in rank["error"]
        assert "sum" not in rank
