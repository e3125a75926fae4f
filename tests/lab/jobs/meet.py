"""Joins the other ranks in all ways that scripts use; then waits for a file ``enough``.

``meet.py ADDRESS PORT``: meanwhile rank 1 keeps connections to this address open, and sends
nothing.
"""

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
flood = []
if rank == 1:
    flood = [socket.create_connection((sys.argv[1], int(sys.argv[2])), 30) for _ in range(600)]
store = dist.TCPStore(*place, timeout=timedelta(seconds=60))
store.set(f"rank {rank}", "here")
store.wait([f"rank {number}" for number in range(world)])
tcp = {"init_method": f"tcp://{place[0]}:{place[1]}", "rank": rank, "world_size": world}
for how in ({}, tcp):
    dist.init_process_group("gloo", **how)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"{rank}: {int(total)} at {place[0]} port {place[1]}", flush=True)
    if how:
        Path(f"met-{rank}").touch(0o600)
        while not Path("enough").exists():
            time.sleep(0.1)
        dist.barrier()
    dist.destroy_process_group()
    # The next group has keys of the same names: a rank could read the addresses of this one.
    store.set(f"left {rank}", "")
    store.wait([f"left {number}" for number in range(world)])
    if rank == 0:
        for key in store.list_keys():
            if not key.startswith(("rank ", "left ")):
                store.delete_key(key)
        store.set("rank cleared", "")
    store.wait(["rank cleared"])
