"""Trains in small steps; a rank misbehaves in step AT: ``steps.py [STEPS [WAY RANK AT]]``.

WAY may be a list with commas; each next way comes ten steps later.

``exit`` ends with status 0, ``sleep`` and ``spin`` stop taking part, ``evaluate`` works alone,
``compile`` runs short-lived child processes, ``write`` writes slowly to a file.
"""

import os
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

from paceline import train

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10**6
way, rank, at = (
    (sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 2 else ("", 0, 0)
)


def crunch(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(100, 100) @ torch.ones(100, 100)
        time.sleep(0.0005)  # leaves most of a CPU to others


def write_slowly(seconds: float) -> None:
    end = time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.write(bytes(1 << 14))
            file.flush()
            time.sleep(0.1)


ways = {at + 10 * number: one for number, one in enumerate(way.split(",")) if one}


def misbehave(way: str) -> None:
    if way == "exit":
        os._exit(0)
    if way == "sleep":
        time.sleep(600)
    if way == "spin":
        crunch(600)
    if way == "evaluate":
        session.phase("evaluate alone")
        crunch(11)
    if way == "compile":
        end = "end=$(($(date +%s) + 11)); while [ $(date +%s) -lt $end ]; do sleep 0.01; done"
        subprocess.run(["sh", "-c", end], check=True)
    if way == "write":
        write_slowly(11)


session = train.join(seed=0)
inputs = torch.randn(1024, 8)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
network = session.place(nn.Linear(8, 1))
model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01))
loader = session.loader(data, global_batch=16)
session.checkpoints(every="10")
print("from", session.progress.step, flush=True)
for _ in session.epochs(loader, steps=steps):
    for x, y in loader:
        if session.world.rank == rank and session.progress.step in ways:
            misbehave(ways[session.progress.step])
        session.step(((model(x) - y) ** 2).mean(1))
        time.sleep(0.05)
session.save_model({"network": "8-1"})
session.close()
