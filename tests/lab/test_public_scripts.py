"""A script that nobody here wrote, unmodified, over two hosts: one of Accelerate's own tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.lab import Lab, LabOptions

pytestmark = [pytest.mark.lab, pytest.mark.slow]


MODULE = "accelerate.test_utils.scripts.test_sync"


def test_runs_over_two_hosts(tmp_path: Path) -> None:
    reason = Lab.available()
    if reason is not None:
        pytest.skip(reason)
    with Lab(LabOptions(hosts=2, debian_hosts=True)) as lab:
        where = ["--hosts", str(lab.hostfile), "--ssh-config", str(lab.ssh_config)]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "run", *where, "--run-dir", "run",
             "--env", "ACCELERATE_USE_CPU=true", "-m", MODULE],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[n1/0] **Test Distributed `no_sync` context manager**" in done.stdout
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count('"event": "world joined", "world_size": 2, "backend": "gloo"') == 2
