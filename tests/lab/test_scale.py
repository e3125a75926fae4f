"""Tests larger numbers of ranks per host, of hosts and of output lines."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

RANKS = 200
SOFT_FILE_LIMIT, HARD_FILE_LIMIT = 256, 4096  # limits of open files, as logins have them


def paceline(*args: str, cwd: Path, files: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    """Runs paceline with these soft and hard limits of open files."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files),
    )


def test_runs_200_ranks_on_host(tmp_path: Path) -> None:
    command = "echo rank $RANK of $WORLD_SIZE, $(ulimit -n) files"
    args = ["run", "-p", str(RANKS), "--run-dir", "run", "--no-python", "sh", "-c", command]
    ended = paceline(*args, cwd=tmp_path, files=(SOFT_FILE_LIMIT, HARD_FILE_LIMIT))
    assert ended.returncode == 0, ended.stderr
    printed = {line.split("] ")[1] for line in ended.stdout.splitlines()}
    # ranks do not get the limit that Paceline raised for itself
    assert printed == {f"rank {rank} of {RANKS}, {SOFT_FILE_LIMIT} files" for rank in range(RANKS)}
    logs = sorted((tmp_path / "run" / "logs").glob("*/[0-9]*.log"))
    assert len(logs) == RANKS
    assert all(log.read_text().startswith(f"rank {log.stem} of") for log in logs)


def test_failed_rank_ends_200_ranks(tmp_path: Path) -> None:
    """Most of the others have not been started when the rank fails."""
    command = "[ $RANK = 5 ] && exit 3; sleep 60"
    args = ["run", "-p", str(RANKS), "--run-dir", "run", "--no-python", "sh", "-c", command]
    ended = paceline(*args, cwd=tmp_path, files=(SOFT_FILE_LIMIT, HARD_FILE_LIMIT))
    assert ended.returncode == 3, ended.stderr
    failure = json.loads((tmp_path / "run" / "result.json").read_text())["first_failure"]
    assert failure["rank"] == 5


def test_rejects_ranks_beyond_open_file_limit(tmp_path: Path) -> None:
    args = ["run", "-p", str(RANKS), "--no-python", "hostname"]
    ended = paceline(*args, cwd=tmp_path, files=(SOFT_FILE_LIMIT, SOFT_FILE_LIMIT))
    assert ended.returncode == 2
    assert f"at most {SOFT_FILE_LIMIT} files may be open" in ended.stderr
    assert f"--nproc-per-node {(SOFT_FILE_LIMIT - 128) // 4}" in ended.stderr  # four pipes per rank


SIMULATED = Path(__file__).parents[1] / "simulated_agents.py"


def launcher_memory_mib(hosts: int, lines: int, width: int, run_dir: Path) -> float:
    """Returns the peak memory in MiB of a launcher with this many simulated agents."""
    argv = [sys.executable, str(SIMULATED), *map(str, (hosts, lines, width)), str(run_dir)]
    limits = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_FILE_LIMIT, SOFT_FILE_LIMIT))  # noqa: E731
    result = subprocess.run(argv, capture_output=True, text=True, timeout=200, preexec_fn=limits)
    assert result.returncode == 0, result.stderr
    return float(json.loads(result.stdout)["mib"])


def test_memory_per_host_is_bounded(tmp_path: Path) -> None:
    """Each host takes little memory (about 50 KiB) and no open file."""
    mib_of_20_hosts, mib_of_500_hosts = (
        launcher_memory_mib(hosts, 3, 100, tmp_path / str(hosts)) for hosts in (20, 500)
    )
    assert mib_of_500_hosts - mib_of_20_hosts < 80
    plan = json.loads((tmp_path / "500" / "plan.json").read_text())
    assert len(plan["nodes"]) == 500


def test_output_is_not_held_in_memory(tmp_path: Path) -> None:
    mib_of_short_output = launcher_memory_mib(20, 3, 10_000, tmp_path / "little")
    mib_of_large_output = launcher_memory_mib(20, 500, 10_000, tmp_path / "much")
    logs = (tmp_path / "much" / "logs").glob("*/*.log")
    assert sum(log.stat().st_size for log in logs) >= 100_000_000
    assert mib_of_large_output - mib_of_short_output < 60
