"""Rank 1 hangs in several ways in turn (``hang.py plain|session``), or in one (``… WAY``).

Ways: ``sleep``: in a function of the script; ``pipe``: writes to a pipe that has no reader;
``child``: waits for a program whose output it does not read; ``worker``: a data loader's worker
waits for a lock that is never released; ``extra``: is in a collective that the other ranks do not
call. A file ``WAY`` in the run directory ends each of these hangs except ``extra``. ``shape`` gives
one collective a tensor of another shape.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

kind, ways = sys.argv[1], sys.argv[2:] or ["sleep", "pipe", "child", "worker", "extra"]
STEPS = {way: 40 + 40 * n for n, way in enumerate(ways)}
BATCH = 8
RELEASE = signal.SIGRTMIN  # sessions and their workers use other signals
odd = os.environ["RANK"] == "1" and "PACELINE_NEWCOMER" not in os.environ
lock = threading.Lock()


class Released(Exception):
    pass


def released(*_: object) -> None:
    raise Released


@contextlib.contextmanager
def until_released() -> Iterator[None]:
    with contextlib.suppress(Released):
        yield


class Samples(Dataset):
    """The process that makes the last sample before the step of ``worker`` waits for ever."""

    made = 0

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        Samples.made += 1
        if odd and Samples.made == BATCH * STEPS.get("worker", 0):
            with until_released():
                lock.acquire()
                lock.acquire()
        return torch.full((8,), index / (1 << 16)), torch.zeros(1)


def release() -> None:
    """Ends each hang when its file exists."""
    for way in STEPS:
        sign = Path(os.environ["PACELINE_RUN_DIR"]) / way
        while not sign.exists():
            time.sleep(0.2)
        pids = [child.pid for child in multiprocessing.active_children()]
        os.kill(pids[0] if way == "worker" else os.getpid(), RELEASE)


def misbehave(step: int) -> None:
    way = next((way for way, at in STEPS.items() if at == step), "")
    if way == "shape":
        dist.all_reduce(torch.ones(3 if odd else 100_000))
    elif way == "extra" and not odd:
        dist.barrier()
    elif odd:
        with until_released():
            hang(way)


def hang(way: str) -> None:
    if way == "sleep":
        time.sleep(600)
    if way == "pipe":
        _, end = os.pipe()
        while True:  # a signal interrupts a write that has written a part
            os.write(end, bytes(1 << 16))
    if way == "child":
        with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as child:
            try:
                child.wait()
            finally:
                child.kill()
    if way == "extra":
        dist.all_reduce(torch.ones(7))


def plain() -> None:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(DataLoader(Samples(), batch_size=BATCH, num_workers=1)):
        misbehave(step)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        time.sleep(0.02)


def session() -> None:
    from paceline import train

    session = train.join(seed=0)
    network = session.place(nn.Linear(8, 1))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01))
    loader = session.loader(Samples(), global_batch=BATCH * session.world.size, workers=1)
    for _ in session.epochs(loader):
        for x, y in loader:
            misbehave(session.progress.step)
            session.step(((model(x) - y) ** 2).mean(1))
            time.sleep(0.02)


if odd:
    signal.signal(RELEASE, released)
    threading.Thread(target=release, daemon=True).start()
plain() if kind == "plain" else session()
