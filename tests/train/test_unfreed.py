"""A rank is lost while the others make a communicator, in which NCCL cannot be interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench/gpu/lost_rank.py"
LIMIT_S = 240.0  # on a busy machine; 30 s on an idle one
LOST = ("--lose=1:forward:20", "--lose=1:connecting:0")


def start(folder: Path, waits: str, *options: str) -> subprocess.Popen[bytes]:
    """A training whose ranks wait for a communicator in this way; see standin.py."""
    run = [
        "run",
        "-p3",
        f"--run-dir={folder}.run",
        "--check=none",
        f"--env=STANDIN_CONNECT={waits}",
    ]
    training = [str(SCRIPT), str(folder), "--dry", "--epochs=8", *LOST]
    argv = [sys.executable, "-m", "paceline", *run, *options, *training]
    with folder.with_suffix(".out").open("wb") as out:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def test_the_launcher_ends_them_with_the_cause_or_starts_them_again(tmp_path: Path) -> None:
    """Whether they use a CPU meanwhile or not."""
    jobs = {
        tmp_path / "spin": start(tmp_path / "spin", "spin", "--max-restarts=1"),
        tmp_path / "sleep": start(tmp_path / "sleep", "sleep"),
    }
    ends = [job.wait(LIMIT_S) for job in jobs.values()]
    spun, slept = (folder.with_suffix(".out").read_text() for folder in jobs)
    assert ends == [0, 1], spun + slept
    why = "hung while a communicator was made, which NCCL does not interrupt: rank 1 was lost then"
    for output in (spun, slept):
        assert f"{why}; ranks 0, 2 were not freed" in output, output
    assert "resumed after step 20" in spun
    assert (tmp_path / "spin" / "end.pt").exists()
    assert "Look for why that rank was lost" in slept
    events = [json.loads(line) for line in (tmp_path / "sleep.run/events.jsonl").open()]
    times = {event["event"]: event["time"] for event in events}
    assert times["rank ended"] - times["newcomer lost"] < 25
