"""Training time lost to saving a 500 MB state: Paceline against blocking ``torch.save``.

A step trains a network of 41.7 million parameters with AdamW (167 MB of weights, 333 MB of
optimizer state). Each round runs three turns in random order: steps without a save, steps with
``torch.save`` after the first, and steps with a Paceline checkpoint started after the first. The
lost time is the difference of the medians over all rounds to the turns without a save. The
background write of a checkpoint finishes before the next turn, outside the measured time. It is
hashed and flushed to the disk, which ``torch.save`` does not do.

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


class ConstantDataset:
    """Batches of ones; the benchmark does not use the loss."""

    def __len__(self) -> int:
        return 1 << 20

    def batch(self, ids: object, draws: object) -> tuple[Tensor, ...]:
        return (torch.ones(BATCH, WIDTH),)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def duration_s(operation: Callable[[], None]) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(measure(folder, options.rounds))
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, rounds: int) -> str:
    with train.join(run_dir=folder, quiet=True, device="cpu", check_every=10**9) as session:
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
        model = session.prepare(net, optimizer)
        loader = session.loader(ConstantDataset(), BATCH)
        session.checkpoints(every="never", keep=1)
        checkpoint_manager = session._checkpoints.keeper
        assert checkpoint_manager is not None

        def run_steps(after_first: Callable[[], None]) -> None:
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

        methods = {
            "none": lambda: None,
            "torch.save": blocking,
            "paceline": checkpoint_manager.save,
        }
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        order = random.Random(0)
        for _ in range(rounds + 1):
            for name, action in order.sample(list(methods.items()), k=len(methods)):
                seconds[name].append(duration_s(lambda action=action: run_steps(action)))  # type: ignore[misc]
                checkpoint_manager._writer.wait()
                (folder / "blocking.pt").unlink(missing_ok=True)
        checkpoint_bytes = sum(path.stat().st_size for path in folder.glob("checkpoints/*/*"))
    return table({name: samples[1:] for name, samples in seconds.items()}, checkpoint_bytes / 1e6)


def table(seconds: dict[str, list[float]], megabytes: float) -> str:
    """Quartiles of the seconds of a turn, and the lost time from the medians, in Markdown."""
    baseline = statistics.median(seconds["none"])
    blocking = statistics.median(seconds["torch.save"]) - baseline
    rows = []
    for name, samples in seconds.items():
        low, middle, high = statistics.quantiles(samples, n=4)
        cells = (f"{cell:.3f}" for cell in (low, middle, high, middle - baseline))
        rows.append(f"| {name} | {' | '.join(cells)} | {(middle - baseline) / blocking:.3f} |")
    summary = f"state {megabytes:.0f} MB, {STEPS} steps a turn, {len(seconds['none'])} rounds\n"
    columns = "| method | lower quartile s | median s | upper quartile s | lost s | ratio |"
    return "\n".join([summary, columns, "|---|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    main()
