"""A minimal job: joins the process group, reduces, prints the result. ``train.py [WAIT]``."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(4) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"sum {int(total[0])} threads {torch.get_num_threads()}", flush=True)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
dist.barrier()
print("done", os.environ["RANK"], flush=True)
dist.destroy_process_group()
