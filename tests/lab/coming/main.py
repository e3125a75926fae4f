"""Initializes like pytorch/examples' imagenet/main.py, without its data, models and torchvision.

It has the same options with the same defaults, the multicast address and nccl included, so that a
command line that lacks an option fails here, too. It spawns two ranks per node, as on a machine
with two GPUs. It trains without wrapping the model, as the original does on CPUs.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PER_NODE = 2


def worker(local: int, options: argparse.Namespace) -> None:
    if options.dist_url == "env://" and options.rank == -1:
        options.rank = int(os.environ["RANK"])
    rank = options.rank * PER_NODE + local
    dist.init_process_group(
        options.dist_backend, init_method=options.dist_url, world_size=options.world_size, rank=rank
    )
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total)
    os.write(1, b"spawned %d of %d\n" % (rank, total))  # one call, because ranks share a pipe
    dist.destroy_process_group()
    # a thread of gloo may still hold the tensor; if Python ends meanwhile, the process aborts
    time.sleep(0.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?", default="imagenet")
    parser.add_argument("-a", "--arch", default="resnet18")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--dist-url", default="tcp://224.66.41.62:23456")
    parser.add_argument("--dist-backend", default="nccl")
    parser.add_argument("--world-size", type=int, default=-1)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--multiprocessing-distributed", action="store_true")
    options = parser.parse_args()
    if options.dist_url == "env://" and options.world_size == -1:
        options.world_size = int(os.environ["WORLD_SIZE"])
    options.world_size *= PER_NODE
    mp.spawn(worker, nprocs=PER_NODE, args=(options,))
