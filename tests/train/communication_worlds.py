"""Runs, in forked worlds, trainings that send compressed gradients."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import error_feedback_worlds
import forked_worlds
import torch
import torch._dynamo
import torch.distributed as dist
from small_launcher import Job
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from paceline import train
from paceline.train.reduce import collectives
from paceline.train.reduce.registry import REDUCERS

STEPS = 30
FIRST = 130  # int4 sends the first tenth in 8 bits: more steps than precede the resumed checkpoint


class Net(nn.Module):
    """Large enough for compressed gradients in several buckets; has batch statistics.

    Gradients do not come in the reverse order of the parameters: the last layer is defined first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rarely, self.last = nn.Linear(96, 96), nn.Linear(96, 4)
        self.layers = nn.Sequential(
            nn.Linear(16, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU()
        )

    def forward(self, inputs: torch.Tensor, rarely: bool) -> torch.Tensor:
        found = self.layers(inputs)
        return self.last(found + self.rarely(found) if rarely else found)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(160, 16, generator=generator)
    return TensorDataset(inputs, (inputs[:, :4] + inputs[:, 4:8]).argmax(1))


def training(
    folder: Path,
    asked: str,
    resume: str = "auto",
    steps: int = STEPS,
    unused: bool = False,
    compiled: bool = False,
    launched: bool = False,
    looks: bool = False,
) -> None:
    """Trains; leaves parameters and losses in the folder.

    Args:
        looks: Search a learning rate before the training continues.
        launched: A launcher is there that could recover lost ranks in place.
    """
    torch.manual_seed(1)
    with train.join(run_dir=folder, seed=4, check_every=7, log_every=5, quiet=True) as session:
        network = session.place(Net())
        made = torch.optim.AdamW(network.parameters(), 3e-3)
        model = session.prepare(network, made, communication=asked, unused=unused, compile=compiled)
        assert (session._membership.recovery is not None) == launched
        if launched and session._loop.bucket_trial is not None:
            session._loop.bucket_trial.is_finished = True  # other bucket sizes are not tried
        exchange = session.models.first.exchange
        if exchange is not None and exchange.reducer is not None:
            exchange.set_bucket_sizes(30_000, 10_000)
        loader, losses = session.loader(data(), 32, limit=10), []
        session.checkpoints(every="11", keep=0, resume=resume)
        if looks:

            def compute(batch: train.Batch) -> torch.Tensor:
                return cross_entropy(model(batch.data[0], True), batch.data[1], reduction="none")

            train.find_lr(session, loader, compute, steps=5)
        for _ in session.epochs(loader, steps=steps):
            for inputs, targets in loader:
                rarely = not unused or session.progress.step % 3 == 0
                given = cross_entropy(model(inputs, rarely), targets, reduction="none")
                losses.append(float(given.detach().mean()))
                session.step(given)
        session.verify()
        state = network.state_dict()
        if session.world.rank == 0:
            torch.save((state, sum(losses[-10:]) / 10), folder / "end.pt")


def end(folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    found: tuple[dict[str, torch.Tensor], float] = torch.load(folder / "end.pt")
    return found


def equal(one: Path, other: Path) -> bool:
    first, second = end(one)[0], end(other)[0]
    return all(torch.equal(first[name], second[name]) for name in first)


def every_way(root: Path) -> None:
    """Runs a whole training with each reducer, and one that resumes from its middle; one world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for asked in REDUCERS:
        whole, parts = root / asked / "whole", root / asked / "parts"
        training(whole, asked)
        if dist.get_rank() == 0:
            for copy in [parts, root / "packed"][: 1 + (asked == "int4")]:
                shutil.copytree(whole / "checkpoints", copy / "checkpoints")
        dist.barrier()
        training(parts, asked, resume="11", looks=True)
        if asked == "int4":
            collectives._COMPRESS_S_PER_BYTE = 0.0  # compressed further, as on a slow link
            training(root / "packed", asked, resume="11")
    whole, parts = root / "first" / "whole", root / "first" / "parts"
    training(whole, "int4", steps=FIRST)
    if dist.get_rank() == 0:
        shutil.copytree(whole / "checkpoints", parts / "checkpoints")
    dist.barrier()
    training(parts, "int4", resume="11", steps=FIRST)


def launched(folder: Path, asked: str) -> None:
    """Trains under a launcher; residuals are used in the next step there, too."""
    torch.set_num_threads(1)
    collectives._COMPRESS_S_PER_BYTE = 0.0
    training(folder, asked, launched=True)


def compiled(root: Path) -> None:
    """Trains a compiled model, whose graph is split by buckets; compressed ones are smaller."""
    torch.set_num_threads(1)
    compile_ = torch.compile
    torch.compile = lambda model: compile_(model, backend="eager")  # type: ignore[assignment]
    training(root / "compiled", "int8", compiled=True)


def seldom(root: Path, steps: int) -> None:
    """Trains with 4-bit gradients and parameters that some steps do not use."""
    torch.set_num_threads(1)
    collectives._COMPRESS_S_PER_BYTE = 0.0
    training(root / "seldom", "int4", steps=steps, unused=True)


def main() -> None:
    root = Path(sys.argv[1])
    by_launcher = ("int4", "int8", "bf16")
    forked_worlds.side_by_side(
        (
            lambda: forked_worlds.run_ok(2, lambda: every_way(root)),
            *(lambda asked=asked: under_launcher(root, asked) for asked in by_launcher),
            lambda: forked_worlds.run_ok(2, lambda: compiled(root)),
            lambda: seldom_with_fewer_ranks(root),
            lambda: (root / "owing.json").write_text(
                json.dumps(error_feedback_worlds.worlds(root))
            ),
        )
    )
    found = {
        asked: {
            "equal": equal(root / asked / "whole", root / asked / "parts"),
            "loss": end(root / asked / "whole")[1],
        }
        for asked in REDUCERS
    }
    found["first"] = {
        "equal": equal(root / "first" / "whole", root / "first" / "parts"),
        "loss": end(root / "first" / "whole")[1],
    }
    found["packed"] = {
        "equal": equal(root / "int4" / "whole", root / "packed"),
        "loss": end(root / "packed")[1],
    }
    for asked in by_launcher:
        folder = root / "launched" / asked
        found[f"launched {asked}"] = {
            "equal": equal(root / asked / "whole", folder),
            "loss": end(folder)[1],
        }
    found["compiled"] = {
        "equal": equal(root / "int8" / "whole", root / "compiled"),
        "loss": end(root / "compiled")[1],
    }
    (root / "found.json").write_text(json.dumps(found))


def under_launcher(root: Path, asked: str) -> None:
    folder = root / "launched" / asked
    Job(lambda: launched(folder, asked), 2, folder).run().ended_well()


def seldom_with_fewer_ranks(root: Path) -> None:
    forked_worlds.run_ok(3, lambda: seldom(root, 12))
    forked_worlds.run_ok(2, lambda: seldom(root, 15))


if __name__ == "__main__":
    main()
