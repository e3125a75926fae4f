"""A plain torch script: DDP, numbered checkpoints below ``out``, resumes from the newest.

``resume_own.py STEPS EVERY SECONDS [MEGABYTES]``: rank 0 saves every EVERY steps, not atomically;
each step takes SECONDS. All ranks must resume at the same step and end with the same weights.
"""

import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

steps, every, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
ballast = torch.zeros(int(float(sys.argv[4]) * 250_000) if len(sys.argv) > 4 else 1)
out = Path("out")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1, dtype=torch.float64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saved = sorted(out.glob("ckpt_*.pt"), key=lambda path: int(path.stem.split("_")[1]))
begin = 0
if saved:
    state = torch.load(saved[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["step"]
print(f"rank {rank} of {world} from step {begin}", flush=True)
begins = [torch.zeros(1) for _ in range(world)]
dist.all_gather(begins, torch.tensor([float(begin)]))
if len({start.item() for start in begins}) > 1:
    raise RuntimeError(f"ranks resume at different steps: {begins}")
for step in range(begin, steps):
    x = torch.full((4, 8), (step % 7) / 7, dtype=torch.float64)
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    time.sleep(pause)
    if rank == 0 and (step + 1) % every == 0:
        out.mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "step": step + 1, "ballast": ballast}  # fmt: skip
        with (out / "log.txt").open("a") as log:
            log.write(f"step {step + 1}\n")
        torch.save(state, out / f"ckpt_{step + 1}.pt")
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(f"rank {rank} ends {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]}", flush=True)
dist.destroy_process_group()
