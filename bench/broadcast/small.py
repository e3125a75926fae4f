"""All-reduce of small messages: Paceline and gloo against MPICH on the same links.

``python bench/broadcast/small.py --mpich PREFIX`` prints Markdown. It needs root, ``ip``, ``tc``
and ``nsenter``, and MPICH with its compiler (``pip install mpich`` in an environment whose folder
is PREFIX) or the program that an earlier run compiled: ``PREFIX/bin/allreduce``.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import os
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src")]

import links
import torch
import torch.distributed as dist

from paceline.train.comms import Comms
from paceline.train.world import World

PROGRAM = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
static int order(const void *a, const void *b) {
  double x = *(double *)a, y = *(double *)b;
  return x < y ? -1 : x > y;
}
int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank, count = atoi(argv[1]), repeats = atoi(argv[2]);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  float *in = calloc(count, 4), *out = calloc(count, 4);
  double *all = calloc(repeats, sizeof(double));
  for (int i = -20; i < repeats; i++) {
    double began = MPI_Wtime();
    MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (i >= 0) all[i] = MPI_Wtime() - began;
  }
  qsort(all, repeats, sizeof(double), order);
  if (!rank) printf("%.9f\n", all[repeats / 2]);
  MPI_Finalize();
}
"""


def median_s(operation: Callable[[], object], repeats: int) -> float:
    for _ in range(20):
        operation()
    dist.barrier()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def mpich_median_s(prefix: Path, pids: list[int], count: int, repeats: int) -> float:
    """Median seconds with MPICH, with one process in the network namespace of each of ``pids``."""
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / "inside"
        nets = " ".join(f"/proc/{pid}/ns/net" for pid in pids)
        wrapper.write_text(
            f'#!/bin/bash\nnets=({nets})\nexec nsenter --net="${{nets[$PMI_RANK]}}" "$@"\n'
        )
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        argv = [prefix / "bin/mpiexec.hydra", "-launcher", "fork", "-hosts", "127.0.0.1"]
        # Without these, MPICH passes messages through shared memory on this machine.
        for name, value in {"MPIR_CVAR_NOLOCAL": 1, "UCX_TLS": "tcp", "FI_PROVIDER": "tcp"}.items():
            argv += ["-genv", name, str(value)]
        argv += ["-n", str(len(pids)), wrapper]
        argv += [prefix / "bin/allreduce", str(count), str(repeats)]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environment["LD_LIBRARY_PATH"] = str(prefix / "lib")
        command = [str(argument) for argument in argv]
        completed = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60
        )
        if completed.returncode:
            raise SystemExit(f"mpiexec: {completed.stdout[-500:]} {completed.stderr[-2000:]}")
    return float(completed.stdout.split()[-1])


def rank(number: int, ranks: int, prefix: Path | None, counts: list[int], repeats: int) -> Any:
    """All measurements of one rank, in seconds."""
    torch.set_num_threads(1)
    comms = Comms(World(number, ranks), torch.device("cpu"))
    pids = [int(pid) for pid in comms.rows(torch.tensor([os.getpid()]))[:, 0]]
    seconds: dict[int, dict[str, float]] = {}
    for count in counts:
        flat = torch.ones(count)
        seconds[count] = {
            "gloo": median_s(lambda flat=flat: dist.all_reduce(flat), repeats),
            "ours": median_s(lambda flat=flat: comms.sum(flat), repeats),
        }
        if prefix is not None:
            dist.barrier()
            if number == 0:
                seconds[count]["mpich"] = mpich_median_s(prefix, pids, count, repeats)
            dist.barrier()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpich", type=Path)
    parser.add_argument("--rate", action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    prefix = options.mpich and options.mpich.resolve()
    if prefix and not (prefix / "bin/allreduce").exists():
        source = prefix / "allreduce.c"
        source.write_text(PROGRAM)
        compile_command = [prefix / "bin/mpicc", source, "-O2", "-o", prefix / "bin/allreduce"]
        subprocess.run([str(argument) for argument in compile_command], check=True)
    columns = ["link", "hosts", "bytes", "gloo", "ours", "MPICH over TCP", "ours/MPICH"]
    print(f"# All-reduce of small messages\n\n{links.machine()}\n\n"
          f"Medians of {options.repeats}, in ms.\n\n"
          f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)  # fmt: skip
    for rate in options.rate or ["", "1gbit"]:
        for size in options.ranks or [2, 4, 8]:
            seconds_by_count = links.on_hosts(
                size, rate, rank, prefix, [1, 10_000], options.repeats
            )[0]
            for count, seconds in seconds_by_count.items():
                mpich = seconds.get("mpich", float("nan"))
                print(f"| {rate or 'unlimited'} | {size} | {4 * count} | "
                      f"{seconds['gloo'] * 1e3:.3f} | {seconds['ours'] * 1e3:.3f} | "
                      f"{mpich * 1e3:.3f} | {seconds['ours'] / mpich:.1f} |",
                      flush=True)  # fmt: skip
    print(f"\nLoad at the end {os.getloadavg()[0]:.1f}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
