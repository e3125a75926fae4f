"""A training whose bytes take as long as its computing: ``put_off.py STEPS backward|auto|late``.

Computing is mostly slept, layer by layer, so that on any machine as much can travel beside it.
"""

import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from paceline import train

WIDTH, LAYERS, SLEPT = 256, 8, 0.005


class Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SLEPT)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * SLEPT)
        return gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(Slept.apply(x)))


class Samples:
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)),)


torch.set_num_threads(1)
session = train.join("put-off", seed=3, device="cpu", log_every=50)
torch.manual_seed(3)
network = nn.Sequential(*(Layer() for _ in range(LAYERS)))
model = session.prepare(
    network, torch.optim.AdamW(network.parameters(), lr=1e-3), overlap=sys.argv[2]
)
loader = session.loader(Samples(), 8, workers=0)
session.checkpoints(every="20", keep=2)
for _ in session.epochs(loader, steps=int(sys.argv[1])):
    for (x,) in loader:
        if session.step((model(x) - x.sin()).square().mean(1)):
            print("step", session.progress.step, flush=True)
session.save_model({"network": "put off"})
session.close()
