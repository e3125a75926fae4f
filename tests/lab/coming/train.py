"""A DDP script for torchrun: reads RANK and LOCAL_RANK, and prints one line at the end."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--model_folder", default="weights")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--ddp", action="store_true")
options = parser.parse_args()

if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
if dist.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(options.epochs):
    torch.nn.functional.mse_loss(model(torch.ones(options.batch_size, 4)), torch.ones(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    folder = Path(options.model_folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pt")
size = dist.get_world_size() if dist.is_initialized() else 1
print(f"trained as {rank} of {size}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
