"""Step time of ``paceline.train`` against a hand-written loop, Fabric and Accelerate.

The variants take turns in one process for each rank. For each variant, the table has the median of
all chunks, the fastest chunk, and the median ratio to the hand-written loop in the same round, in
wall-clock time and in CPU time (which other jobs on the machine hardly change).

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


def measure(
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
        processes = [
            subprocess.Popen(
                argv,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate(timeout=1200)[0] for process in processes]
    (line,) = (line for line in outputs[0].splitlines() if line.startswith("seconds "))
    return dict(json.loads(line.removeprefix("seconds ")))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def table(ranks: int, batch: int, steps: int, rounds: int) -> str:
    """Table in Markdown with a row for each variant."""
    seconds = measure(ranks, batch, steps, rounds)
    by_hand = seconds["by hand"]
    rows = []
    for variant, chunks in seconds.items():
        wall_s = [chunk[0] for chunk in chunks]
        ratios = [
            statistics.median(
                variant_chunk[kind] / hand_chunk[kind]
                for variant_chunk, hand_chunk in zip(chunks, by_hand, strict=True)
            )
            for kind in (0, 1)
        ]
        median, fastest = 1e3 * statistics.median(wall_s) / steps, 1e3 * min(wall_s) / steps
        rows.append(
            f"| {variant} | {median:.3f} | {fastest:.3f} | {ratios[0]:.3f} | {ratios[1]:.3f} |"
        )
    table_head = "| variant | median ms/step | fastest ms/step | ratio | ratio of CPU time |"
    title = f"{ranks} rank{'s' * (ranks > 1)}, global batch {batch}"
    return "\n".join([title, "", table_head, "|---|---|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    os.environ["BENCH_DEVICE"] = options.device
    for ranks in options.ranks:
        print(table(ranks, options.batch, options.steps, options.rounds), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
