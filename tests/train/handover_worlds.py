"""Sends training states from rank to rank, in forked worlds."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_worlds
import torch
import torch._dynamo
from torch import nn

from paceline import train
from paceline.spec.errors import PacelineError
from paceline.train.checkpoints import handover
from paceline.train.checkpoints.capture import Training
from paceline.train.checkpoints.handover import send_models, send_training
from paceline.train.data.loader import Progress
from paceline.train.models import Models
from paceline.train.update import Average, Updater

STEPS, KIND = 4, torch.float64


class Net(nn.Module):
    """Has batch statistics, and weights whose memory order differs from that of their indices."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm, self.two = nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.two(self.norm(self.one(inputs)).mean((2, 3)))


def made(session: train.Session, seed: int, steps: int, names: tuple[str, ...]) -> Training:
    """Trains each rank alone, from its own seed."""
    torch.manual_seed(seed)
    models = Models()
    for name in names:
        module = Net().to(KIND)
        adam = torch.optim.Adam(module.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(adam, 2)
        updater = Updater(module, adam, schedule, None, None)
        updater.average = Average(module, session.comms, 0.9)
        models.add(name, updater)
        for _ in range(steps):
            updater.backward(module(torch.randn(4, 3, 6, 6, dtype=KIND)).square().mean())
            updater.update()
    best = train.Best(value=float(seed), step=steps)
    progress = Progress(steps, 1, 10 * steps, 100)
    extras = {"metrics": session._journal, "best": best}
    return Training(models, progress, 7, extras, {"size": "3"})


def content(training: Training) -> dict[str, Any]:
    """Returns the whole state in a comparable form."""
    state = {"module": training.models.module.state_dict(), "models": training.models.state()}
    done = training.progress
    return {
        "state": json.loads(json.dumps(state, default=torch.Tensor.tolist)),
        "at": [done.step, done.epoch, done.offset, done.steps, done.some_absent],
        "best": training.extras["best"].state_dict(),
    }


def handed(
    folder: Path,
    *,
    names: tuple[str, ...] = ("",),
    afresh: bool = True,
    harm: Callable[[train.Session], object] = lambda session: None,
    identity: str = "3",
    within: str = "100 of Samples",
    idle: bool = False,
) -> None:
    """Sends rank 1's state to rank 2; rank 0 keeps its own. Writes states before and after."""
    torch.set_num_threads(1)
    with train.join(run_dir=folder, dtype="float64") as session:
        rank = session.world.rank
        training = made(session, 10 + rank, 0 if rank == 2 and afresh else STEPS + rank, names)
        if rank != 2:
            session._journal.meter.add(2, loss=torch.tensor([1.0, 3.0]))
        elif identity != "3":
            training.identity = {"size": identity}
        training.context = {"training samples": within if rank == 2 else "100 of Samples"}
        for progress in (session.progress, training.progress):
            progress.some_absent = idle and rank != 2
        before = content(training)
        harm(session)
        problem = ""
        try:
            send_training(training, session.comms, 1, {2}, is_new=afresh and rank == 2)
        except PacelineError as error:
            problem = f"{error.message}\n{error.found}"
        except RuntimeError as error:  # another rank has exited
            problem = f"RuntimeError: {error}"
        session.progress.some_absent = training.progress.some_absent
        (folder / f"{rank}.json").write_text(
            json.dumps(
                {
                    "before": before,
                    "after": content(training),
                    "next": random.random(),
                    "open": session._journal.state_dict(),
                    "problem": problem,
                }
            )
        )
        if problem:
            os._exit(0)  # the group cannot be left in order


def went_on(folder: Path, change: Callable[[Models], object], steps: int) -> None:
    """Rank 1 changes its models after each step, then sends them to rank 2 before its next step."""
    torch.set_num_threads(1)
    with train.join(run_dir=folder, dtype="float64") as session:
        rank = session.world.rank
        training = made(session, 10 + rank, 0, ("one", "two"))
        models, problem = training.models, ""
        for step in range(steps):
            inputs = torch.randn(4, 3, 6, 6, dtype=KIND)
            for name in ("one", "two"):
                models.backward(name, models[name].module(inputs).square().mean(), is_last=True)
            for one in models:
                one.update()
            models.record_commit()
            with models.averaged():
                pass  # as in an evaluation
            before = content(training)
            if rank == 1 and step:
                change(models)
        if rank == 1:
            loss = models["one"].module(torch.randn(4, 3, 6, 6, dtype=KIND)).square().mean()
            models.backward("one", loss, is_last=True)  # the next step has started
        changed = content(training)
        try:
            send_models(models, session.comms, 1, {2})
        except PacelineError as error:
            problem = f"{error.message}\n{error.found}"
        found = {"before": before, "changed": changed, "after": content(training)}
        (folder / f"{rank}.json").write_text(json.dumps({**found, "problem": problem}))


def shrunk(models: Models) -> None:
    for one in models.module.parameters():
        one.data.mul_(0.5)


def rewritten(models: Models) -> None:
    with torch.no_grad():
        next(models.module.parameters()).add_(1.0)


def slowed(models: Models) -> None:
    for one in models:
        one.optimizer.param_groups[0]["lr"] *= 0.5


def left_alone(_: Models) -> None:
    pass


def flipped(session: train.Session) -> None:
    """Flips one bit of one piece on its way to rank 2."""
    handover.PIECE_BYTES = 512
    spread, count = type(session.comms).broadcast, 0

    def harmed(comms: Any, tensors: Any, source: int = 0) -> None:
        nonlocal count
        spread(comms, tensors, source)
        count += 1
        if session.world.rank == 2 and tensors[0].numel() == 512 and count > 6:
            tensors[0][7] ^= 1
            count = -1000

    type(session.comms).broadcast = harmed


def small(session: train.Session) -> None:
    handover.PIECE_BYTES = 1000  # not a multiple of any tensor's size


def grown(folder: Path, megabytes: int = 96) -> None:
    """Measures how much a rank's memory grows when it receives a large state."""
    torch.set_num_threads(1)
    with train.join(run_dir=folder) as session:
        module = nn.Linear(1 << 10, megabytes << 8, bias=False)
        models = Models(
            {"": Updater(module, torch.optim.SGD(module.parameters()), None, None, None)}
        )
        training = Training(models, Progress(), 0)
        session.comms.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        send_training(training, session.comms, 0, {1}, is_new=session.world.rank == 1)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (folder / f"{session.world.rank}.json").write_text(json.dumps((after - before) / 1024))


def main(folder: Path) -> None:
    """Runs all worlds; each writes what its ranks saw under its name."""
    worlds: dict[str, dict[str, Any]] = {
        "afresh": {},
        "behind": {"afresh": False},
        "in small pieces": {"harm": small},
        "two models": {"names": ("one", "two")},
        "beside who idles": {"idle": True},
        "wrong": {"harm": flipped, "afresh": False},
        "another": {"identity": "4", "afresh": False},
        "another loader": {"within": "200 of Other", "afresh": False},
        "another afresh": {"identity": "4"},
    }
    for name, how in worlds.items():
        (folder / name).mkdir()
        forked_worlds.run_ok(3, lambda name=name, how=how: handed(folder / name, **how))
    changes: dict[str, tuple[Callable[[Models], object], int]] = {
        "shrunk": (shrunk, 4),
        "slowed": (slowed, 6),
        "left alone": (left_alone, 5),
        "rewritten at first": (rewritten, 4),
    }
    for name, (change, steps) in changes.items():
        (folder / name).mkdir()
        forked_worlds.run_ok(3, lambda one=folder / name, c=change, n=steps: went_on(one, c, n))
    (folder / "grown").mkdir()
    forked_worlds.run_ok(2, lambda: grown(folder / "grown"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
