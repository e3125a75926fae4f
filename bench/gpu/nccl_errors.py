"""One rank of a group over NCCL that fails: nccl_errors.py CASE RANK RANKS PORT; run by all.py.

`killed`: the last rank is killed at step 30; `mismatch`: rank 1 does not call a collective;
`interface` and `same_host` fail because of variables that all.py sets. With --dry it uses gloo.
"""

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    case, rank, ranks, port = sys.argv[1], *map(int, sys.argv[2:5])
    is_dry = "--dry" in sys.argv
    device = "cpu" if is_dry else "cuda:0"
    limit = datetime.timedelta(seconds=15)
    address = f"tcp://127.0.0.1:{port}"
    backend = "gloo" if is_dry else "nccl"
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=ranks, timeout=limit
    )
    ones = torch.ones(1 << 20, device=device)
    for step in range(200):
        if case == "killed" and step == 30 and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "mismatch" and step == 30 and rank == 1:
            time.sleep(30)
        work = dist.all_reduce(ones.clone(), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        work.wait()
        time.sleep(0.01)
    if not is_dry:
        torch.cuda.synchronize()
    dist.destroy_process_group()


main()
