"""Training for fault injection: ``steady.py STEPS STEP_MS FOLDER [--global-batch N]``.

A small float64 network with Adam, a spectral norm (each forward pass changes its vectors), and an
augmentation that depends only on the sample. The final parameters therefore do not depend on how
the samples are divided among ranks. With ``--width 1024`` every step sends 8 MB, so that a fault
nearly always interrupts messages. Every rank appends a line for each finished step to
``FOLDER/HOST-PID.steps`` (``step N RANK MONOTONIC``). At the end rank 0 saves the parameters to
``FOLDER/final.npy``.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import paceline.train as pt

SAMPLES, FEATURES = 4096, 24


class Samples:
    """Samples with an augmentation that depends only on the sample."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        self.y = self.x.sin().sum(1, keepdim=True) + 0.1 * self.x[:, :1] ** 2

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.Generator().manual_seed(index)
        augmented = self.x[index] + 0.01 * torch.randn(
            FEATURES, generator=noise, dtype=torch.float64
        )
        return augmented, self.y[index]


def main(
    steps: int, step_ms: float, folder: Path, global_batch: int, width: int, workers: int
) -> None:
    torch.set_num_threads(1)
    session = pt.join("steady", seed=3, device="cpu", dtype="float64", log_every=50)
    torch.manual_seed(3)
    first, second = nn.Linear(FEATURES, width), nn.Linear(width, width)
    output = nn.Linear(width, 1)
    model = nn.Sequential(spectral_norm(first), nn.Tanh(), second, nn.Tanh(), output).double()
    model = session.place(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 200, 0.9)
    net = session.prepare(model, optimizer, schedule)
    loader = session.loader(Samples(), global_batch, workers=workers)
    session.checkpoints(every="100", keep=2)
    log = (folder / f"{session.world.host}-{os.getpid()}.steps").open("a", buffering=1)
    for _ in session.epochs(loader, steps=steps):
        for x, y in loader:
            time.sleep(step_ms / 1000)
            losses = ((net(x) - y) ** 2).mean(1)
            if session.step(losses):
                finished = time.monotonic()
                log.write(f"step {session.progress.step} {session.world.rank} {finished}\n")
    if session.world.rank == 0:
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        np.save(folder / "final.npy", flat.numpy())
    session.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("step_ms", type=float)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--global-batch", type=int, default=48)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--workers", type=int, default=0)
    main(**vars(parser.parse_args()))
