"""More of everything than a first try has: ranks on a host, hosts, output."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

RANKS = 200
FEW, ENOUGH = 256, 4096  # open files, as a login may be limited


def paceline(*words: str, cwd: Path, files: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    """Runs it as a login would that may open so many files (soft and hard limit)."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
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


def test_one_of_many_fails_and_the_others_end(tmp_path: Path) -> None:
    """While most of them have not been started yet."""
    command = "[ $RANK = 5 ] && exit 3; sleep 60"
    words = ["run", "-p", str(RANKS), "--run-dir", "run", "--no-python", "sh", "-c", command]
    ended = paceline(*words, cwd=tmp_path, files=(FEW, ENOUGH))
    assert ended.returncode == 3, ended.stderr
    failure = json.loads((tmp_path / "run" / "result.json").read_text())["first_failure"]
    assert failure["rank"] == 5


def test_more_ranks_than_open_files_allow(tmp_path: Path) -> None:
    words = ["run", "-p", str(RANKS), "--no-python", "hostname"]
    ended = paceline(*words, cwd=tmp_path, files=(FEW, FEW))
    assert ended.returncode == 2
    assert f"at most {FEW} files may be open" in ended.stderr
    assert f"--nproc-per-node {(FEW - 128) // 4}" in ended.stderr  # four pipes a rank


SIMULATED = Path(__file__).parents[1] / "simulated.py"


def memory(hosts: int, lines: int, width: int, run_dir: Path) -> float:
    """MiB of a launcher, at most, with so many agents that are simulated within it."""
    argv = [sys.executable, str(SIMULATED), *map(str, (hosts, lines, width)), str(run_dir)]
    limits = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))  # noqa: E731
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, preexec_fn=limits)
    assert done.returncode == 0, done.stderr
    return float(json.loads(done.stdout)["mib"])


def test_five_hundred_hosts(tmp_path: Path) -> None:
    """Little memory each (it is about 50 KiB), and no file that stays open."""
    few, many = (memory(hosts, 3, 100, tmp_path / str(hosts)) for hosts in (20, 500))
    assert many - few < 80
    plan = json.loads((tmp_path / "500" / "plan.json").read_text())
    assert len(plan["nodes"]) == 500


def test_output_does_not_stay_in_memory(tmp_path: Path) -> None:
    little = memory(20, 3, 10_000, tmp_path / "little")
    much = memory(20, 500, 10_000, tmp_path / "much")
    logs = (tmp_path / "much" / "logs").glob("*/*.log")
    assert sum(log.stat().st_size for log in logs) >= 100_000_000
    assert much - little < 60
