"""The measured job: joins the world, does one all-reduce, prints the wall-clock moment."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print(f"all-reduce {value.item():.0f} at {time.time():.6f}", flush=True)
dist.destroy_process_group()
