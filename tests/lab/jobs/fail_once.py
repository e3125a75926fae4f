"""Joins the process group, fails in the first attempt, and succeeds in the second."""

import os
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if os.environ["PACELINE_ATTEMPT"] == "0":
    sys.exit(4)
dist.destroy_process_group()
