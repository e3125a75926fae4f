"""Trains with given weights of three hosts, and makes another loader after each epoch."""

import torch
from torch.utils.data import TensorDataset

from paceline import train

WEIGHTS = "n1=3,n2=1,n3=1"

with train.join(log_every=1000) as session:
    network = session.place(torch.nn.Linear(8, 1))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01))
    data = TensorDataset(torch.ones(1600, 8))
    loader = session.loader(data, 80, balance=WEIGHTS)
    for _ in session.epochs(loader, 100_000):
        for (x,) in loader:
            session.step(model(x).square().mean(1))
        session.loader(data, 80, balance=WEIGHTS, limit={"n2": 4})
        print("an epoch of", session.world.size, flush=True)
