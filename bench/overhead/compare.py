"""Step time through ``paceline.train`` against a loop written by hand, Fabric and Accelerate.

The ways take turns in one process for each rank. Compared are, for each way, the median of all
chunks, the fastest chunk, and the median of the ratio to the loop by hand in the same round, by
the wall clock and in CPU time (which other jobs on the machine hardly change).

    python bench/overhead/compare.py [--ranks 1 2] [--rounds 30] [--steps 50] [--batch 64]
                                      [--device cuda, with one rank]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORK = Path(__file__).with_name("work.py")


def measured(
    ranks: int, batch: int, steps: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each chunk on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        common = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "BENCH_FOLDER": folder,
        }
        argv = [sys.executable, str(WORK), str(batch), str(steps), str(rounds)]
        started = [
            subprocess.Popen(
                argv,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate(timeout=1200)[0] for process in started]
    (line,) = (line for line in said[0].splitlines() if line.startswith("seconds "))
    return dict(json.loads(line.removeprefix("seconds ")))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def table(ranks: int, batch: int, steps: int, rounds: int) -> str:
    """One row for each way."""
    seconds = measured(ranks, batch, steps, rounds)
    hand = seconds["by hand"]
    rows = []
    for way, taken in seconds.items():
        wall = [one[0] for one in taken]
        ratios = [
            statistics.median(
                ours[kind] / theirs[kind] for ours, theirs in zip(taken, hand, strict=True)
            )
            for kind in (0, 1)
        ]
        median, fastest = 1e3 * statistics.median(wall) / steps, 1e3 * min(wall) / steps
        rows.append(f"| {way} | {median:.3f} | {fastest:.3f} | {ratios[0]:.3f} | {ratios[1]:.3f} |")
    head = "| way | median ms/step | fastest ms/step | ratio | ratio of CPU time |"
    title = f"{ranks} rank{'s' * (ranks > 1)}, global batch {batch}"
    return "\n".join([title, "", head, "|---|---|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    os.environ["BENCH_DEVICE"] = asked.device
    for ranks in asked.ranks:
        print(table(ranks, asked.batch, asked.steps, asked.rounds), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
