"""As the ImageNet example: one start a node, which spawns its ranks and gives them an address."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PER_NODE = 2


def worker(local: int, options: argparse.Namespace) -> None:
    rank = options.rank * PER_NODE + local
    dist.init_process_group(
        options.dist_backend, init_method=options.dist_url, world_size=options.world_size, rank=rank
    )
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"spawned {rank} of {int(total)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?", default="")
    parser.add_argument("-a", "--arch", default="resnet18")
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--dist-backend", default="gloo")
    parser.add_argument("--world-size", type=int, default=-1)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--multiprocessing-distributed", action="store_true")
    options = parser.parse_args()
    if options.world_size == -1:
        options.world_size = int(os.environ["WORLD_SIZE"])
    if options.rank == -1:
        options.rank = int(os.environ["RANK"])
    options.world_size *= PER_NODE
    mp.spawn(worker, nprocs=PER_NODE, args=(options,))
