"""A script that brings its own world: it must not get to its first step."""

import os

import torch.distributed as dist

rank = 0
dist.init_process_group(
    "gloo", init_method=f"file:///tmp/world-{os.getpid()}", rank=0, world_size=1
)
print("step 1", flush=True)
