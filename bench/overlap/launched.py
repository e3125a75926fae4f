"""One case of :mod:`overlap` as a launched job, in which lost ranks are recovered from.

    paceline lab up --hosts 2 --rate 1gbit
    paceline run --hosts lab bench/overlap/launched.py emulated-1000 auto
    paceline run --hosts lab bench/overlap/launched.py emulated-1000 late

Rank 0 prints a row: rate, ranks, ``overlap``, C, W and the session's step in ms, and how many times
the bound that is. All is measured in this run; of 55 steps the last twelve count, and of the ranks
the slowest.
"""

# ruff: noqa: E402
from __future__ import annotations

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from overlap import CASES, optimizer_of, plain
from torch.utils.data import TensorDataset

from paceline import train

STEPS = 55


def moments(session: train.Session, make: Any, samples: int, overlap: Any) -> list[float]:
    """When each step of a training ended, by ``time.perf_counter``."""
    module = make()
    model = session.prepare(module, optimizer_of(module), overlap=overlap)
    rows = torch.randint(0, 256, (STEPS * samples * session.world.size, 129))
    loader = session.loader(TensorDataset(rows), samples * session.world.size, workers=0)
    ends = []
    for _ in session.epochs(loader, steps=STEPS):
        for (inputs,) in loader:
            session.step(module.loss(model(inputs), inputs))
            ends.append(time.perf_counter())
    return ends


def main() -> None:
    case, overlap = sys.argv[1:]
    _, rate, make, samples, _ = CASES[case]
    torch.set_num_threads(1)
    with train.join(check_every=10**9, log_every=10**9, device="cpu") as session:
        torch.manual_seed(1)
        module, inputs = make(), torch.randint(0, 256, (samples, 129))
        computing = statistics.median(plain(module, module, inputs, 6)[2:])
        flat, alone = torch.ones(sum(one.numel() for one in module.parameters())), []
        for _ in range(4):
            session.comms.barrier()
            began = time.perf_counter()
            dist.all_reduce(flat)
            alone.append(time.perf_counter() - began)
        ends = moments(session, make, samples, overlap)
        steps = statistics.median(b - a for a, b in itertools.pairwise(ends[-13:]))
        mine = torch.tensor([computing, statistics.median(alone[1:]), steps])
        c, w, t = session.comms.rows(mine).max(dim=0).values.tolist()
        if session.world.rank == 0:
            ranks, bound = session.world.size, max(c, w)
            print(f"| {rate} | {ranks} | {overlap} | {1e3 * c:.0f} | {1e3 * w:.0f} | {1e3 * t:.0f}"
                  f" | {t / bound:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
