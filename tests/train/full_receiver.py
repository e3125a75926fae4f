"""Sends one of two ranks a message whose buffer has been freed, and measures gloo's threads."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.train.elastic import gloo
from paceline.train.elastic.connections import GlooConnections

TIMEOUT_S = 60.0
BUSY_S = 0.2  # seconds of CPU time that show that an idle thread is busy


def until(true: Callable[[], bool]) -> bool:
    """Waits for a condition; returns whether it became true in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def used() -> float:
    """Returns the CPU seconds of the threads that handle gloo's connections."""
    return sum(task.cpu_s for task in gloo.tasks() if task.name == gloo.LOOPS)


def quiet() -> bool:
    """Returns whether these threads used almost no CPU time in the last second."""
    before = used()
    time.sleep(1.0)
    return used() - before < BUSY_S / 4


def main(folder: Path) -> None:
    links, rank = GlooConnections(), int(os.environ["RANK"])
    with links.tracked(2):
        store = dist.FileStore(str(folder / "store"), 2)  # a store without a connection of its own
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        dist.barrier()
    if rank == 1:
        sent = dist.isend(torch.ones(1 << 20), 0)
        until((folder / "0.json").exists)
        assert sent is not None
        dist.destroy_process_group()
        return
    names = sorted({task.name for task in gloo.tasks() if task.is_gloo})
    work = dist.irecv(torch.empty(1 << 20), 1)
    del work  # as a failed operation leaves it
    before = used()
    busy = until(lambda: used() - before > BUSY_S)
    links.shut_down()
    closed = until(links.all_closed)
    found = [busy, closed, until(quiet)]
    dist.destroy_process_group()  # removes the descriptor from gloo's epoll, or aborts
    left = [task.name for task in gloo.tasks() if task.is_gloo]
    (folder / "0.json").write_text(json.dumps([names, *found, left]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
