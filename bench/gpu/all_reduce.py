"""One rank that sums tensors over NCCL: all_reduce.py RANK RANKS PORT [--dry]; run by all.py.

Rank 0 prints for each size whether the sums are correct, and the milliseconds of an all-reduce.
With --dry it uses gloo.
"""

import sys
import time

import torch
import torch.distributed as dist

SIZES = (1_000, 1 << 24)
REPEATS = 5


def main() -> None:
    rank, ranks, port = map(int, sys.argv[1:4])
    is_dry = "--dry" in sys.argv
    device = torch.device("cpu" if is_dry else "cuda:0")
    backend, address = "gloo" if is_dry else "nccl", f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks)
    for size in SIZES:
        times = []
        for _ in range(REPEATS):
            values = torch.full((size,), float(rank + 1), device=device)
            start = time.perf_counter()
            dist.all_reduce(values)
            is_correct = bool((values == ranks * (ranks + 1) / 2).all())  # waits for the device
            times.append(1000 * (time.perf_counter() - start))
        if rank == 0:
            print(f"{size} elements: correct {is_correct}, {sorted(times)[REPEATS // 2]:.1f} ms")
    dist.destroy_process_group()


main()
