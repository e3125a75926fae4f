"""The training of ``steady.py``, written for other launchers.

``peers.py ddp|torchft STEPS MS FOLDER``. ``ddp`` is for torchrun's elastic mode: plain DDP, rank 0
saves a checkpoint every 10 steps into a shared folder, and all ranks load it after a restart.
``torchft`` has one replica group per process; a ``Manager`` sends the state to replicas that
rejoin. Both record the time of each finished step as ``steady.py`` does.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

SAMPLES, FEATURES, BATCH = 4096, 24, 16
TIMEOUT = timedelta(seconds=20)


def model_and_data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64)
    layers = (nn.Linear(FEATURES, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    return nn.Sequential(*layers).double(), x, x.sin().sum(1, keepdim=True)


def ddp(steps: int, step_s: float, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x, y = model_and_data()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    checkpoint, first_step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    net = nn.parallel.DistributedDataParallel(model)
    log = (folder / f"{socket.gethostname()}-{os.getpid()}.steps").open("a", buffering=1)
    for step in range(first_step + 1, steps + 1):
        time.sleep(step_s)
        start = (step * size + rank) * BATCH % SAMPLES
        optimizer.zero_grad()
        ((net(x[start : start + BATCH]) - y[start : start + BATCH]) ** 2).mean().backward()
        optimizer.step()
        log.write(f"step {step} {rank} {time.monotonic()}\n")
        if rank == 0 and step % 10 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    dist.destroy_process_group()


def torchft(steps: int, step_s: float, folder: Path) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, x, y = model_and_data()
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)

    def load(state: dict[str, object]) -> None:
        model.load_state_dict(state["model"])  # type: ignore[arg-type]
        adam.load_state_dict(state["optimizer"])  # type: ignore[arg-type]

    host = socket.gethostname()
    store = dist.TCPStore(os.environ["MY_ADDRESS"], 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=1,
        replica_id=f"steady_{host}_",
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=os.environ["MY_ADDRESS"],
        store_port=store.port,
        hostname=os.environ["MY_ADDRESS"],
    )
    net = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    log = (folder / f"{host}-{os.getpid()}.steps").open("a", buffering=1)
    while manager.current_step() < steps:
        time.sleep(step_s)
        start = manager.current_step() * BATCH % SAMPLES
        optimizer.zero_grad()
        ((net(x[start : start + BATCH]) - y[start : start + BATCH]) ** 2).mean().backward()
        previous_step = manager.current_step()
        optimizer.step()
        if manager.current_step() > previous_step:
            log.write(f"step {manager.current_step()} {host} {time.monotonic()}\n")
    manager.shutdown()


if __name__ == "__main__":
    train = {"ddp": ddp, "torchft": torchft}[sys.argv[1]]
    torch.set_num_threads(1)
    train(int(sys.argv[2]), float(sys.argv[3]) / 1000, Path(sys.argv[4]))
