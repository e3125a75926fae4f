"""One rank fails while the others wait for it in a collective: ``fail_in_step.py RANK``."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == int(sys.argv[1]):
    1 / 0  # noqa: B018
dist.all_reduce(total)
print("not reached")
