"""A session whose weights, gradients, messages and checkpoints contain fixed byte patterns."""

import struct
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from paceline import train

WEIGHT, GRADIENT = struct.unpack("<ff", b"PAc<LIn=")

session = train.join(seed=0)
data = torch.utils.data.TensorDataset(torch.ones(1024, 256))
network = session.place(nn.Linear(256, 256, bias=False))
nn.init.constant_(network.weight, WEIGHT)
model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
loader = session.loader(data, global_batch=2)  # one sample each, so that gradients are not rounded
session.checkpoints(every="10")
dist.distributed_c10d._get_default_store().set("mark", "paceline's message")
dist.broadcast(torch.frombuffer(bytearray(b"a whole message"), dtype=torch.uint8), 0)
for _ in session.epochs(loader, steps=int(sys.argv[1])):
    for (x,) in loader:
        session.step(model(x).sum(1) * GRADIENT)
        time.sleep(0.05)
assert bool((network.weight == WEIGHT).all())
print("weights as before", flush=True)
session.close()
