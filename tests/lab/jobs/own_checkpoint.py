"""A plain torch script: DDP over gloo; rank 0 saves a checkpoint of its own.

``own_checkpoint.py FOLDER STEPS [SECONDS]``: each step takes SECONDS. If STEPS is ``over``, all
ranks stop after the step in which a file of that name exists in FOLDER.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

BEGAN = time.time()  # close to the process's start: the fork server has imported torch

folder, steps = Path(sys.argv[1]), sys.argv[2]
pause = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02
rank = int(os.environ["RANK"])
told = {name: value for name, value in os.environ.items() if name.startswith("TORCHELASTIC")}
place = f"rank {rank} of {os.environ['WORLD_SIZE']}, node {os.environ['GROUP_RANK']} of"
print(f"began {BEGAN:.3f} {place} {os.environ['GROUP_WORLD_SIZE']},"
      f" restart {told['TORCHELASTIC_RESTART_COUNT']} of {told['TORCHELASTIC_MAX_RESTARTS']},"
      f" run {told['TORCHELASTIC_RUN_ID']}", flush=True)  # fmt: skip

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1, dtype=torch.float64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = folder / "own.pt"
begin = 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    begin = state["step"]
print(f"from step {begin}", flush=True)
for step in range(begin, 10**9 if steps == "over" else int(steps)):
    x = torch.full((4, 8), (step % 7) / 7, dtype=torch.float64)
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    time.sleep(pause)
    if rank == 0:
        torch.save({"model": model.state_dict(), "step": step + 1}, folder / "own.tmp")
        (folder / "own.tmp").replace(saved)
    over = torch.tensor(float(steps == "over" and (folder / "over").exists()))
    dist.all_reduce(over)
    if over:
        break
if rank == 0:
    print(f"weights {model.module.weight.sum().item():.12f} after {steps}", flush=True)
dist.destroy_process_group()
