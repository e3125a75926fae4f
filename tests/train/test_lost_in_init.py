"""Tests the loss of a rank while the others create a communicator, which NCCL cannot interrupt."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench/gpu/lost_rank.py"
LIMIT_S = 240.0  # for a busy machine; takes 30 s on an idle one
LOST = ("--lose=1:forward:20", "--lose=1:connecting:0")


def start_training(folder: Path, wait_mode: str, *options: str) -> subprocess.Popen[bytes]:
    """Starts a training whose ranks wait for a communicator; see ``device_stand_in.py``."""
    run = [
        "run",
        "-p3",
        f"--run-dir={folder}.run",
        "--check=none",
        f"--env=STANDIN_CONNECT={wait_mode}",
    ]
    training = [str(SCRIPT), str(folder), "--dry", "--epochs=12", *LOST]
    argv = [sys.executable, "-m", "paceline", *run, *options, *training]
    with folder.with_suffix(".out").open("wb") as out:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def test_launcher_ends_or_restarts_unfreed_ranks(tmp_path: Path) -> None:
    """Both with ranks that use a CPU while they wait and with ranks that do not."""
    jobs = {
        tmp_path / "spin": start_training(tmp_path / "spin", "spin", "--max-restarts=1"),
        tmp_path / "sleep": start_training(tmp_path / "sleep", "sleep"),
    }
    ends = [job.wait(LIMIT_S) for job in jobs.values()]
    spun, slept = (folder.with_suffix(".out").read_text() for folder in jobs)
    assert ends == [0, 1], spun + slept
    cause = (
        "hung while a communicator was made, which NCCL does not interrupt: rank 1 was lost then"
    )
    for output in (spun, slept):
        assert f"{cause}; ranks 0, 2 were not freed" in output, output
    assert re.search(r"resumed after step \d", spun)
    assert (tmp_path / "spin" / "end.pt").exists()
    explain = [sys.executable, "-m", "paceline", "explain", f"{tmp_path / 'sleep'}.run"]
    explanation = subprocess.run(explain, capture_output=True, text=True, check=True).stdout
    assert "Look for why that rank was lost" in explanation
    events = [json.loads(line) for line in (tmp_path / "sleep.run/events.jsonl").open()]
    times = {event["event"]: event["time"] for event in events}
    assert times["rank ended"] - times["newcomer lost"] < 25
