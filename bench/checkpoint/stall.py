"""Time that a save of a 500 MB state steals from the training: against blocking torch.save.

A step trains a network of 41.7 million parameters with AdamW (167 MB of weights, 333 MB of
optimizer state). In an order drawn for each round: some steps without a save, some with
``torch.save`` after the first, and some with a checkpoint of ours begun after the first. Stolen is
the difference to those without, of the medians over all rounds. The write of ours is complete
before the next turn begins, outside the clock; it is hashed and flushed to the disk, which
``torch.save`` does not do.

    python bench/checkpoint/stall.py [--rounds 15] [--folder DIR] [--threads 1]
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline import train

WIDTH, LAYERS, BATCH, STEPS = 2283, 8, 48, 8


class Blank:
    """A data set of noise; the loss does not matter here."""

    def __len__(self) -> int:
        return 1 << 20

    def batch(self, ids: object, draws: object) -> tuple[Tensor, ...]:
        return (torch.ones(BATCH, WIDTH),)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def timed(steps: Callable[[], None]) -> float:
    started = time.perf_counter()
    steps()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=None)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    folder = Path(tempfile.mkdtemp(dir=asked.folder))
    try:
        print(measured(folder, asked.rounds))
    finally:
        shutil.rmtree(folder)


def measured(folder: Path, rounds: int) -> str:
    with train.join(run_dir=folder, quiet=True, device="cpu", check_every=10**9) as session:
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
        model = session.prepare(net, optimizer)
        loader = session.loader(Blank(), BATCH)
        session.checkpoints(every="never", keep=1)
        keeper = session._checkpoints.keeper
        assert keeper is not None

        def some(after_first: Callable[[], None]) -> None:
            session.progress.offset = 0
            start = session.progress.step
            for _ in session.epochs(loader, steps=start + STEPS):
                for (inputs,) in loader:
                    session.step(model(inputs).pow(2).mean(1))
                    if session.progress.step == start + 1:
                        after_first()

        def blocking() -> None:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "blocking.pt")

        ways = {"none": lambda: None, "torch.save": blocking, "paceline": keeper.save}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        order = random.Random(0)
        for _ in range(rounds + 1):
            for name, act in order.sample(list(ways.items()), k=len(ways)):
                seconds[name].append(timed(lambda act=act: some(act)))  # type: ignore[misc]
                keeper._writer.wait()
                (folder / "blocking.pt").unlink(missing_ok=True)
        kept = sum(path.stat().st_size for path in folder.glob("checkpoints/*/*"))
    return table({name: taken[1:] for name, taken in seconds.items()}, kept / 1e6)


def table(seconds: dict[str, list[float]], megabytes: float) -> str:
    """Stolen seconds: of the medians over all rounds, with the rounds' quartiles."""
    base = statistics.median(seconds["none"])
    blocking = statistics.median(seconds["torch.save"]) - base
    rows = []
    for name, taken in seconds.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        cells = (f"{cell:.3f}" for cell in (low, middle, high, middle - base))
        rows.append(f"| {name} | {' | '.join(cells)} | {(middle - base) / blocking:.3f} |")
    head = f"state {megabytes:.0f} MB, {STEPS} steps a turn, {len(seconds['none'])} rounds\n"
    columns = "| way | lower quartile s | median s | upper quartile s | stolen s | ratio |"
    return "\n".join([head, columns, "|---|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    main()
