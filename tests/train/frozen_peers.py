"""Measures how long a rank waits for the rest of a message from or to a frozen rank.

gloo does not wake a rank whose message was incomplete when its connection ended. Prints for each
way of waiting how many seconds the other rank still waited after its connections were cut.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.train.comms import Comms
from paceline.train.elastic import waits
from paceline.train.elastic.connections import GlooConnections
from paceline.train.elastic.control import Control
from paceline.train.elastic.job_group import JobGroup
from paceline.train.elastic.recovery import Recovery
from paceline.train.world import World

RANKS, FLOATS, TIMEOUT_S = 2, 16 << 20, 20.0
WAYS = ("at once", "promised", "chain")


def rank(number: int, way: str, control: int, folder: Path) -> None:
    """Exchanges messages until that fails."""
    torch.set_num_threads(1)
    links, place = GlooConnections(), World(number, RANKS, number, RANKS, "n1", True)
    comms = Comms(place, torch.device("cpu"))
    with links.tracked(RANKS):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number,
                                world_size=RANKS, timeout=timedelta(seconds=60))  # fmt: skip
    cut, told = links.shut_down, []

    def noted() -> None:
        told.append(time.monotonic())
        cut()

    links.shut_down = noted  # type: ignore[method-assign]
    told_by = Control(control, links)
    Recovery(number, comms, told_by, JobGroup(told_by, links, lambda *_: None))
    much = torch.zeros(FLOATS)
    comms.barrier()
    (folder / f"{number}.here").touch()
    try:
        while True:
            if way == "chain":
                comms.broadcast([much])
            elif way == "promised":
                waits.cancellable_future(dist.broadcast(much, 0, async_op=True), much).wait()
            elif way == "at once":
                waits.wait(dist.broadcast(much, 0, async_op=True), much)
            else:
                dist.broadcast(much, 0)
    except RuntimeError:
        (folder / f"{number}.json").write_text(json.dumps(time.monotonic() - told[0]))
    os._exit(0)


def trial(way: str, lost: int, folder: Path) -> float | None:
    """Returns how many seconds the other rank waited; ``None`` if it still waits."""
    folder.mkdir()
    pids, ends = [], []
    for number in range(RANKS):
        read, write = os.pipe()
        if not (pid := os.fork()):
            rank(number, way, read, folder)
        pids.append(pid)
        ends.append(write)
    try:
        while len([*folder.glob("*.here")]) < RANKS:
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(pids[lost], signal.SIGSTOP)
        time.sleep(0.5)
        word = {"generation": 1, "members": [], "store": {"address": "n1", "port": 1}}
        os.write(ends[1 - lost], json.dumps({**word, "planned": False}).encode() + b"\n")
        found, late = folder / f"{1 - lost}.json", time.monotonic() + TIMEOUT_S
        while not (found.exists() and found.read_text()) and time.monotonic() < late:
            time.sleep(0.02)
        return float(json.loads(found.read_text())) if found.exists() else None
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    for name in sys.argv[2:] or WAYS:
        for gone in range(RANKS):
            seconds = trial(name, gone, Path(sys.argv[1]) / f"{name} {gone}")
            print(json.dumps([name, gone, seconds]), flush=True)
