"""The last rank uses the store after the first rank has exited."""

import os
import time

import torch.distributed as dist

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
store.set("word", "kept")
dist.barrier()
if int(os.environ["RANK"]) > 0:
    time.sleep(0.8)
    assert store.get("word") == b"kept"
dist.destroy_process_group()
