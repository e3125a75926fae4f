"""Each rank spawns one process; the two wait for a third process that is never started."""

import os

import torch.distributed as dist
import torch.multiprocessing as mp


def work(_: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)


if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
