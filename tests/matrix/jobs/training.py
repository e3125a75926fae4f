"""A small training session: ``training.py STEPS``; each step takes ``$STEP_S`` seconds."""

import os
import sys
import time

import torch
from torch import nn

from paceline import train

with train.join("matrix", seed=1, device="cpu") as session:
    network = session.place(nn.Linear(8, 1))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(2))
    loader = session.loader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, True)), 8)
    session.checkpoints(every="never")
    for _ in session.epochs(loader, steps=int(sys.argv[1])):
        for x, y in loader:
            time.sleep(float(os.environ.get("STEP_S", "0")))
            if session.step(((model(x) - y) ** 2).mean(1)):
                print("step", session.progress.step, flush=True)
    session.save_model({"network": "8-1"})
