"""More of everything than a first try has: ranks on a host."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 200
FEW, ENOUGH = 256, 4096  # open files, as a login may be limited


def paceline(*words: str, cwd: Path, files: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    """Runs it as a login would that may open so many files (soft and hard limit)."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files),
    )


def test_two_hundred_ranks_on_one_host(tmp_path: Path) -> None:
    command = "echo rank $RANK of $WORLD_SIZE, $(ulimit -n) files"
    words = ["run", "-p", str(RANKS), "--run-dir", "run", "--no-python", "sh", "-c", command]
    ended = paceline(*words, cwd=tmp_path, files=(FEW, ENOUGH))
    assert ended.returncode == 0, ended.stderr
    said = {line.split("] ")[1] for line in ended.stdout.splitlines()}
    # what was raised for our own use is not the ranks' limit
    assert said == {f"rank {rank} of {RANKS}, {FEW} files" for rank in range(RANKS)}
    logs = sorted((tmp_path / "run" / "logs").glob("*/[0-9]*.log"))
    assert len(logs) == RANKS
    assert all(log.read_text().startswith(f"rank {log.stem} of") for log in logs)


@pytest.mark.parametrize("rank", [5, RANKS - 1])
def test_one_of_many_fails_and_the_others_end(tmp_path: Path, rank: int) -> None:
    """Also while most of them have not been started yet."""
    command = f"[ $RANK = {rank} ] && exit 3; sleep 60"
    words = ["run", "-p", str(RANKS), "--run-dir", "run", "--no-python", "sh", "-c", command]
    ended = paceline(*words, cwd=tmp_path, files=(FEW, ENOUGH))
    assert ended.returncode == 3, ended.stderr
    failure = json.loads((tmp_path / "run" / "result.json").read_text())["first_failure"]
    assert failure["rank"] == rank


def test_more_ranks_than_open_files_allow(tmp_path: Path) -> None:
    words = ["run", "-p", str(RANKS), "--no-python", "hostname"]
    ended = paceline(*words, cwd=tmp_path, files=(FEW, FEW))
    assert ended.returncode == 2
    assert f"at most {FEW} files may be open" in ended.stderr
    assert "--nproc-per-node 42" in ended.stderr
