"""Run by the test on two ranks: one is sent a message for which it has no room any more."""

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
BUSY_S = 0.2  # of a CPU's time, used by a thread that has nothing to do


def until(true: Callable[[], bool]) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def used() -> float:
    """CPU time of the threads that move what goes over connections, in seconds."""
    return sum(task.cpu_s for task in gloo.tasks() if task.name == gloo.LOOPS)


def quiet() -> bool:
    """Whether they rest for as long as they were seen busy in."""
    before = used()
    time.sleep(1.0)
    return used() - before < BUSY_S / 4


def main(folder: Path) -> None:
    links, rank = GlooConnections(), int(os.environ["RANK"])
    with links.tracked(2):
        store = dist.FileStore(str(folder / "store"), 2)  # without a connection of its own
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
    del work  # as an operation that fails leaves it
    before = used()
    busy = until(lambda: used() - before > BUSY_S)
    links.shut_down()
    closed = until(links.all_closed)
    found = [busy, closed, until(quiet)]
    dist.destroy_process_group()  # takes the descriptor out of its epoll, or aborts
    left = [task.name for task in gloo.tasks() if task.is_gloo]
    (folder / "0.json").write_text(json.dumps([names, *found, left]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
