"""Little messages among a few hosts: our sum and gloo's beside MPICH's on the same links.

``python bench/broadcast/small.py --mpich PREFIX`` prints Markdown. It needs root, ``ip``, ``tc``
and ``nsenter``, and MPICH with its compiler (``pip install mpich`` in an environment whose folder
is PREFIX) or a program that was compiled with it before: ``PREFIX/bin/allreduce``.
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


def median(act: Callable[[], object], repeats: int) -> float:
    for _ in range(20):
        act()
    dist.barrier()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def by_mpich(prefix: Path, numbers: list[int], count: int, repeats: int) -> float:
    """The median in MPICH, one process in the network of each of these."""
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / "inside"
        nets = " ".join(f"/proc/{one}/ns/net" for one in numbers)
        wrapper.write_text(
            f'#!/bin/bash\nnets=({nets})\nexec nsenter --net="${{nets[$PMI_RANK]}}" "$@"\n'
        )
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        argv = [prefix / "bin/mpiexec.hydra", "-launcher", "fork", "-hosts", "127.0.0.1"]
        # Otherwise it sees that all are on one machine, and passes messages in memory.
        for name, value in {"MPIR_CVAR_NOLOCAL": 1, "UCX_TLS": "tcp", "FI_PROVIDER": "tcp"}.items():
            argv += ["-genv", name, str(value)]
        argv += ["-n", str(len(numbers)), wrapper]
        argv += [prefix / "bin/allreduce", str(count), str(repeats)]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        environment["LD_LIBRARY_PATH"] = str(prefix / "lib")
        words = [str(one) for one in argv]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
        if done.returncode:
            raise SystemExit(f"mpiexec: {done.stdout[-500:]} {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def rank(number: int, ranks: int, prefix: Path | None, counts: list[int], repeats: int) -> Any:
    """All measurements of one world, in seconds."""
    torch.set_num_threads(1)
    comms = Comms(World(number, ranks), torch.device("cpu"))
    numbers = [int(one) for one in comms.rows(torch.tensor([os.getpid()]))[:, 0]]
    found: dict[int, dict[str, float]] = {}
    for count in counts:
        flat = torch.ones(count)
        found[count] = {
            "gloo": median(lambda flat=flat: dist.all_reduce(flat), repeats),
            "ours": median(lambda flat=flat: comms.sum(flat), repeats),
        }
        if prefix is not None:
            dist.barrier()
            if number == 0:
                found[count]["mpich"] = by_mpich(prefix, numbers, count, repeats)
            dist.barrier()
    return found


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
        words = [prefix / "bin/mpicc", source, "-O2", "-o", prefix / "bin/allreduce"]
        subprocess.run([str(one) for one in words], check=True)
    columns = ["link", "hosts", "bytes", "gloo", "ours", "MPICH over TCP", "ours/MPICH"]
    print(f"# All-reduce of little\n\n{links.machine()}\n\nMedians of {options.repeats}, in ms.\n\n"
          f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)  # fmt: skip
    for rate in options.rate or ["", "1gbit"]:
        for size in options.ranks or [2, 4, 8]:
            found = links.on_hosts(size, rate, rank, prefix, [1, 10_000], options.repeats)[0]
            for count, one in found.items():
                mpich = one.get("mpich", float("nan"))
                print(f"| {rate or 'as it is'} | {size} | {4 * count} | {one['gloo'] * 1e3:.3f} | "
                      f"{one['ours'] * 1e3:.3f} | {mpich * 1e3:.3f} | {one['ours'] / mpich:.1f} |",
                      flush=True)  # fmt: skip
    print(f"\nLoad at the end {os.getloadavg()[0]:.1f}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
