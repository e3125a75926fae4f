"""Trains a small model for five steps; the argument selects how ranks exchange gradients."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 5


def train(how: str, rank: int, world_size: int) -> None:
    if how != "no group":
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model: nn.Module = nn.Linear(2, 1)
    if how == "ddp":
        model = DistributedDataParallel(model)
    elif how == "fsdp":
        fully_shard(model)
    if how == "send without training":
        tensor = torch.ones(4)
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        dist.destroy_process_group()
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step = optimizer.step
    if how == "own":  # the script's own hook is called after ours
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: None)
    if how == "compiled":
        take_step = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(STEPS):
        model(torch.ones(4, 2)).sum().backward()
        if how in ("own", "compiled"):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        elif how == "average at the end" and step == STEPS - 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
        elif how == "send":
            activations = torch.ones(4)
            dist.send(activations, 1) if rank == 0 else dist.recv(activations, 0)
        elif how == "metrics":
            dist.all_reduce(torch.ones(1))
        elif how == "objects":
            models: list[object] = [None, None]
            dist.all_gather_object(models, model.state_dict())
        take_step()
        optimizer.zero_grad()
    # The group is not destroyed: on a busy machine that may wait for ever for a thread of gloo.


def spawned(index: int, how: str) -> None:
    train(how, int(os.environ["RANK"]) + index, 2)


if __name__ == "__main__":
    how, processes = sys.argv[1:]
    if processes == "spawned":
        mp.spawn(spawned, (how,), 1)
    elif how != "nothing":
        train(how, int(os.environ["RANK"]), 2)
