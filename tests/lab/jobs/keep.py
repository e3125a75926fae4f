"""A session that saves checkpoints on request: ``keep.py [STEPS [SECONDS]]`` (SECONDS per step)."""

import sys
import time

import torch
from torch import nn

from paceline import train

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10**6
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0.05
with train.join() as session:
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    net = session.prepare(model := nn.Linear(4, 2), torch.optim.SGD(model.parameters(), lr=0.1))
    loader = session.loader(data, 16)
    session.checkpoints(every="never")
    for _ in session.epochs(loader, steps=steps):
        for inputs, labels in loader:
            time.sleep(seconds)
            session.step(nn.functional.cross_entropy(net(inputs), labels, reduction="none"))
            print("step", session.progress.step, flush=True)
