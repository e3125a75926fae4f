"""Forms groups in which one rank stops before it connects, on forked ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked_worlds
import torch
import torch.distributed as dist
from failed_groups import TRAINING, Said, make
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.train.comms import Comms
from paceline.train.elastic import job_group
from paceline.train.elastic.connections import GlooConnections
from paceline.train.elastic.control import RegroupMessage
from paceline.train.elastic.recovery import Recovery
from paceline.train.world import World

ROUNDS = 6  # in some rounds it is the other ranks that wait for the connection
FORMING = timedelta(seconds=40)
KNOWN_S = 0.4


class Stopping(dist.Store):
    """Publishes this rank's address, and blocks when it should read those of others."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        while True:
            time.sleep(60)

    def multi_get(self, keys: Any) -> Any:
        return self.get(keys)

    def wait(self, *_: Any) -> None:
        self.get("")

    def has_extended_api(self) -> bool:
        return False


def word(number: int, size: int, port: int) -> RegroupMessage:
    members = tuple((slot, "n1", slot, size) for slot in range(size))
    return RegroupMessage(number, members, "127.0.0.1", port, False)


def stops(number: int, port: int) -> None:
    """Runs the third rank: it publishes its address and stops there."""
    client = TCPStore("127.0.0.1", port, None, False, FORMING, wait_for_workers=False)
    store = PrefixStore(f"generation/{number}", client)
    store.add("here", 1)
    make(Stopping(PrefixStore("default_pg", store)), World(2, 3, 2, 3, "n1", True), FORMING)


def stays(rank: int, port: int, folder: Path) -> None:
    """Runs another rank; records how long it is held up after the loss of the third is known."""
    control, links = Said(), GlooConnections()
    place, own = World(rank, 2, rank, 2, "n1", True), control
    comms = Comms(place, torch.device("cpu"))
    group = job_group.JobGroup(own, links, make)  # type: ignore[arg-type]
    one = Recovery(rank, comms, own, group)  # type: ignore[arg-type]
    one.training = TRAINING
    held: list[float] = []
    for number in range(1, 2 * ROUNDS, 2):
        known: list[float] = []

        def told(number: int = number, known: list[float] = known) -> None:
            control.word = word(number + 1, 2, port)
            known.append(time.monotonic())
            links.shut_down()

        telling = threading.Timer(KNOWN_S, told)
        telling.start()
        with contextlib.suppress(RuntimeError):  # the group is formed if both connect to the third
            one._form(word(number, 3, port))
        over = time.monotonic()
        telling.join()
        held.append(over - known[0])
        one._form(word(number + 1, 2, port))
        assert comms.rows(torch.tensor([rank])).tolist() == [[0], [1]]
    (folder / f"{rank}.json").write_text(json.dumps(held))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    job_group._FORMING = FORMING
    server, port = forked_worlds.store(FORMING)

    def stayer(rank: int) -> int:
        return forked_worlds.forked({}, lambda: stays(rank, port, folder))

    def stopper(number: int) -> int:
        return forked_worlds.forked({}, lambda: stops(number, port))

    stoppers = [stopper(number) for number in range(1, 2 * ROUNDS, 2)]
    try:
        statuses = forked_worlds.finish([stayer(rank) for rank in range(2)], 200)
    finally:
        for pid in (server, *stoppers):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    sys.exit(any(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
