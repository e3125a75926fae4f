"""One rank of ``ratio.py``: all-reduces of 50 MB, or DDP steps with 4 MB of gradients.

    steps.py reduce|train|busy COUNT COMPUTING

Rank 0 prints the seconds of each repetition. COMPUTING is the approximate computing time of a step
in seconds: "train" sleeps, which leaves a core free for encryption; "busy" multiplies matrices.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
workload, count, computing_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
seconds, matrix = [], torch.ones(400, 400)
if workload == "reduce":
    tensor = torch.ones(12_500_000)
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - start)
        tensor.fill_(1.0)
else:
    network = nn.parallel.DistributedDataParallel(nn.Linear(1000, 1000))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(count):
        start = time.perf_counter()
        if workload == "train":
            time.sleep(computing_s)
        else:
            for _ in range(round(computing_s * 500)):  # 2 ms each
                matrix @ matrix
        optimizer.zero_grad()
        network(torch.ones(8, 1000)).mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
if dist.get_rank() == 0:
    print(json.dumps(seconds[2:]))
dist.destroy_process_group()
