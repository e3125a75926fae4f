"""Trains in float64 with Adam and prints steps: ``outlive.py STEPS [PAUSE [WIDTH]]``.

While a file ``struck`` exists, each step takes PAUSE seconds (default 0.25), so that a fault occurs
before the training ends. While a file ``loading`` exists, the ranks wait before they train.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline import train

SAMPLES, FEATURES = 2048, 16


class Samples:
    """Samples with an augmentation that depends only on the sample, not on the rank."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, FEATURES, generator=drawn, dtype=torch.float64)
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.Generator().manual_seed(index)
        moved = 0.01 * torch.randn(FEATURES, generator=noise, dtype=torch.float64)
        return self.x[index] + moved, self.y[index]


torch.set_num_threads(1)
session = train.join("outlive", seed=3, device="cpu", dtype="float64", log_every=50)
print("loading", flush=True)
while Path("loading").exists():
    time.sleep(0.05)
torch.manual_seed(3)
width = int(sys.argv[3]) if len(sys.argv) > 3 else 32
network = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1)).double()
network = session.place(network)
model = session.prepare(network, torch.optim.Adam(network.parameters(), lr=2e-3))
loader = session.loader(Samples(), 48, workers=0)
session.checkpoints(every="50", keep=2)
pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.25
print("began", flush=True)
for _ in session.epochs(loader, steps=int(sys.argv[1])):
    for x, y in loader:
        time.sleep(pause_s if Path("struck").exists() else 0.02)
        if session.step(((model(x) - y) ** 2).mean(1)):
            print("step", session.progress.step, flush=True)
session.save_model({"network": "16-32-1"})
session.close()
