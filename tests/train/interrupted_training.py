"""A training that waits at a chosen moment to be interrupted.

Arguments: MOMENT START_METHOD READY. The file READY is made at that moment. By then each rank has
two kinds of data workers: those of the session's loader, and those of a DataLoader of its own.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline import train
from paceline.train.checkpoints.writer import Writer

MOMENT_STEP = 3
PAUSE_S = 0.7  # longer than the session's interval of polling for signals


class Samples(Dataset[tuple[torch.Tensor]]):
    """Samples of ones."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.ones(2),)


def main(moment: str, ready: Path) -> None:
    session = train.join(seed=0, device="cpu")
    rank = session.world.rank
    net = session.place(torch.nn.Linear(2, 1))
    model = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    batches_in_epoch = MOMENT_STEP if moment == "epoch-end" else 400 // 8
    data = torch.utils.data.Subset(Samples(), range(8 * batches_in_epoch))
    loader = session.loader(data, global_batch=8, workers=1)
    evaluation = session.shard(Samples(), size=8)
    own = DataLoader(Samples(), batch_size=4, num_workers=1, persistent_workers=True)
    session.checkpoints(every=str(MOMENT_STEP) if moment == "checkpoint" else "never")
    own_batches = iter(own)

    def come(of_rank: int = 0) -> None:
        if rank == of_rank and not ready.exists():
            ready.write_text(str(session.progress.step))

    if moment == "checkpoint":
        write_slowly(come)
    for _ in session.epochs(loader, 100_000):
        for (x,) in loader:
            session.step(model(x).pow(2).mean(1))
            time.sleep(0.02)
            own_batches = own_batches if next(own_batches, None) is not None else iter(own)
            if session.progress.step < MOMENT_STEP or moment == "epoch-end":
                continue
            if moment == "step":
                come()
            elif moment == "collective" and rank == 1:
                come(of_rank=1)
                time.sleep(PAUSE_S if session.progress.step == MOMENT_STEP else 0)
            elif moment == "evaluation":
                come()
                with torch.inference_mode():  # as the tutorial does
                    while True:
                        for _ in evaluation:
                            time.sleep(PAUSE_S)
        if moment == "epoch-end":
            come()
            for _ in own:
                time.sleep(PAUSE_S / 100)
    session.close()


def write_slowly(first: Callable[[], None]) -> None:
    """Slows down the writing of checkpoints; calls a function when the writing starts."""
    write = Writer._write

    def write_later(*parts: Any) -> None:
        first()
        time.sleep(PAUSE_S)
        write(*parts)

    Writer._write = write_later  # type: ignore[method-assign]


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[2])
    main(sys.argv[1], Path(sys.argv[3]))
