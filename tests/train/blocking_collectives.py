"""Checks that no rank completes an operation before all ranks have started it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_worlds
import torch
import torch._dynamo
from torch import nn

from paceline import train
from paceline.train import parallel
from paceline.train.comms import Comms
from paceline.train.measure.pace import _PendingGather
from paceline.train.reduce.exchange import GradientExchange

LATE_S = 0.4


class Counting:
    """Counts operations, as a recovery does."""

    def __init__(self, stale: bool) -> None:
        self.stale, self.count = stale, 0

    def event(self, act: Callable[[], Any]) -> Any:
        result = act()
        self.count += 1
        return result

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def begun(comms: Comms, model: parallel.Replica) -> dict[str, Callable[[], object]]:
    """Returns operations by name; their asynchronous parts have been started on every rank."""
    one = torch.ones(3)
    sent = _PendingGather(comms, torch.ones(4), 0, 1)
    exchange = GradientExchange(model, comms)
    return {
        "sum": lambda: comms.sum(one),
        "most": lambda: comms.max(one),
        "rows": lambda: comms.rows(one),
        "texts": lambda: comms.texts("here"),
        "spread": lambda: comms.broadcast([one]),
        "barrier": comms.barrier,
        "new_group": comms.new_group,
        "notes": sent.rows,
        "as made": exchange.reset,
    }


def rank(folder: Path) -> None:
    torch.set_num_threads(1)
    with train.join(run_dir=folder / "run", quiet=True) as session:
        plain = session.comms
        found = {}
        for stale in (False, True):
            model = parallel.replicate(nn.Linear(2, 2), session.device, plain)
            mender = Counting(stale)
            comms = Comms(plain.world, plain.device, fault_handler=mender)  # type: ignore[arg-type]
            for name, operation in begun(comms, model).items():
                before = mender.count
                plain.barrier()
                if session.world.rank == 1:
                    time.sleep(LATE_S)
                came = time.monotonic()
                operation()
                assert mender.count == before + 1, name
                found[f"{name}, stale" if stale else name] = came, time.monotonic()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    forked_worlds.run_ok(2, lambda: rank(Path(sys.argv[1])))
