"""Runs worlds in which ranks get unequal shares of each batch."""

from __future__ import annotations

import contextlib
import io
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
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
from unused_parameters import Branches

from paceline import train
from paceline.spec.errors import JobError, SettingError
from paceline.train import parallel, start
from paceline.train.measure import largest_batch

STEPS, BATCH = 40, 32
SIZES = 1, 2, 3, 4


def numbers(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)


class Slow(nn.Module):
    """A network whose forward pass takes a fixed time and a time per sample on this rank.

    It has a buffer that forward passes read and that rank 0 sends to all.
    """

    def __init__(self, sample: Callable[[], float], fixed: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("unit", torch.ones(()))
        self.sample, self.fixed = sample, fixed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.fixed + self.sample() * len(inputs))
        outputs: torch.Tensor = self.layers(inputs * self.unit)
        return outputs


def flat(module: nn.Module) -> list[float]:
    return torch.cat([one.detach().flatten() for one in module.parameters()]).tolist()


def again(session: train.Session) -> None:
    session.progress.step = session.progress.epoch = session.progress.offset = 0
    torch.manual_seed(2)


def slowed(
    session: train.Session,
    seconds: Callable[[], float],
    fixed: float = 0.0,
    views: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Trains with a delay per sample on this rank; returns times, shares and final parameters.

    Args:
        views: How often each step calls the model.
    """
    again(session)
    network = session.place(Slow(seconds, fixed))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model = session.prepare(network, optimizer)
    loader = session.loader(numbers(200), BATCH, **options)
    took: list[float] = []
    shares: list[int] = []
    for _ in session.epochs(loader, steps=STEPS):
        for batch in loader:
            began = time.perf_counter()
            inputs, targets = batch
            found = sum(model(inputs) for _ in range(views)) / views
            session.step(mse_loss(found, targets, reduction="none")[:, 0])
            shares.append(batch.count)
            took.append(time.perf_counter() - began)
    session.verify()
    return {"end": flat(network), "took": took, "shares": shares}


def trained(session: train.Session, *, shard: bool = False, **options: Any) -> list[float]:
    """Trains two epochs with a smaller last batch each; returns parameters and means."""
    again(session)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    network = session.place(network, shard=shard)
    model = session.prepare(
        network, torch.optim.AdamW(network.parameters(), lr=0.01), clip_norm=0.5
    )
    loader = session.loader(numbers(43), 12, **options)
    means = []
    for _ in session.epochs(loader, 2):
        for inputs, targets in loader:
            losses = mse_loss(model(inputs), targets, reduction="none")[:, 0]
            session.step(losses, square=losses.detach() ** 2)
        meter = session.meter()
        for batch in session.shard(numbers(17), 4):
            meter.add(batch.count, value=batch.data[1][:, 0])
        found = meter.result()
        means += [float(found.count), found["value"]]
    if shard:
        weights = parallel.full_state(network)
        return [*(float(x) for one in weights.values() for x in one.flatten()), *means]
    return [*flat(network), *means]


def fitted(session: train.Session, *, tight: bool) -> dict[str, Any]:
    """Trains while only some samples of a share fit into the memory of a tight rank."""
    again(session)
    network = session.place(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01))
    loader = session.loader(numbers(43), 24)

    def compute(batch: train.Batch) -> torch.Tensor:
        inputs, targets = batch
        room = torch.zeros(len(inputs), 1 << 22)  # 16 MiB for each sample
        return mse_loss(model(inputs), targets, reduction="none")[:, 0] + room.sum(1)

    free, largest_batch._free_bytes = largest_batch._free_bytes, lambda: 125e6 if tight else 1e12
    try:
        said = train.fit_batch(session, loader, compute)
    finally:
        largest_batch._free_bytes = free
    counts = []
    for _ in session.epochs(loader, 2):
        for batch in loader:
            session.step(compute(batch))
            counts.append(batch.count)
    return {"end": flat(network), "counts": counts, "said": said}


def partly_used(session: train.Session, **options: Any) -> list[float]:
    again(session)
    network = session.place(Branches())
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), unused=True)
    loader = session.loader(numbers(24), 6, **options)
    for _ in session.epochs(loader, 2):
        for inputs, targets in loader:
            step = session.progress.step
            session.step(mse_loss(model(inputs, step), targets, reduction="none")[:, 0])
    return flat(network)


def two_models(folder: Path, **options: Any) -> list[float]:
    with train.join(run_dir=folder / "two", dtype="float64", seed=5, quiet=True) as session:
        session.leaves_group = False
        torch.manual_seed(2)
        models = {}
        for name in ("one", "two"):
            network = session.place(nn.Linear(3, 1))
            optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
            models[name] = session.prepare(network, optimizer, name=name)
        loader = session.loader(numbers(24), 6, **options)
        for _ in session.epochs(loader, 2):
            for inputs, targets in loader:
                first = models["one"](inputs)
                second = models["two"](inputs + first)
                session.step(
                    {
                        "one": mse_loss(first, targets, reduction="none")[:, 0],
                        "two": mse_loss(second, targets, reduction="none")[:, 0],
                    }
                )
        return flat(session.models.module)


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except SettingError as error:
        return error.message
    return ""


def world(folder: Path) -> None:
    """Runs one rank, each on a host of its own; all but the first are three times as slow."""
    torch.set_num_threads(1)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
    slow, alone = rank > 0, size == 1
    hosts = [f"n{number + 1}" for number in range(size)]
    os.environ["PACELINE_HOST"] = hosts[rank]
    heavy = {host: 1 if number else 3 for number, host in enumerate(hosts)}
    weights: dict[str, Any] = {} if alone else {"balance": heavy}
    # four ranks on a busy machine with two CPUs wake up late
    own = 0.0 if alone else (0.003 if slow else 0.001) * (1 if size == 2 else 5)
    said = io.StringIO()
    begun = time.monotonic()
    with (
        contextlib.redirect_stdout(said),
        train.join(run_dir=folder / "run", dtype="float64", seed=5) as session,
    ):
        auto = {"balance": "auto"}
        found: dict[str, Any] = {
            "auto": slowed(session, lambda: own, **auto),
            "trained": trained(session, **weights),
            "accumulated": trained(session, limit=2, **weights),
            "sharded": trained(session, limit=2, shard=True, **weights),
            "partly used": partly_used(session, limit=3, **weights),
        }
        if size <= 2:
            found |= {
                "by host": trained(session, limit=0 if alone else {"n2": 2}),
                "fitted": fitted(session, tight=slow),
                "two models": two_models(folder, limit=3, **weights),
            }
        if size == 2:
            twenty = 0.004 if slow else 0.0002
            found["twenty"] = slowed(session, lambda: twenty, **auto)
            found["dropped"] = slowed(
                session, lambda: 0.0005, 0.04 if slow else 0.0, 2, drop_slow=True, **auto
            )
            found["even"] = slowed(session, lambda: own)
            found["refused"] = [
                refused(lambda: session.loader(numbers(9), 4, balance={"n1": 1, "n9": 1})),
                refused(lambda: session.loader(numbers(9), 4, balance={"n1": 1})),
                refused(lambda: session.loader(numbers(9), 1, balance="auto")),
                refused(lambda: session.loader(numbers(9), 4, drop_slow=True)),
                refused(lambda: trained(session, balance="quick")),
                refused(lambda: trained(session, balance="auto", shard=True)),
                refused(lambda: trained(session, limit={"n1": 2}, shard=True)),
                refused(lambda: session.loader(numbers(9), 4, limit={"n9": 1})),
                refused(lambda: session.loader(numbers(9), 4, limit={"n1": 0})),
            ]
    found["said"], found["seconds"] = said.getvalue(), time.monotonic() - begun
    (folder / f"{session.world.rank}.json").write_text(json.dumps(found))


def resumed(folder: Path) -> None:
    """Trains 16 steps, then repeats the last four of them after a resume."""
    torch.set_num_threads(1)
    slow = int(os.environ["RANK"])
    os.environ["PACELINE_HOST"] = "n2" if slow else "n1"
    found: dict[str, Any] = {}
    for name in ("whole", "rest"):
        with train.join(run_dir=folder / name, dtype="float64", seed=5, quiet=True) as session:
            session.leaves_group = False
            torch.manual_seed(2)
            network = session.place(Slow(lambda: 0.006 if slow else 0.002))
            model = session.prepare(network, torch.optim.AdamW(network.parameters(), lr=0.01))
            loader = session.loader(numbers(200), BATCH, balance="auto")
            session.checkpoints(
                every="12", resume=str(folder / "whole/checkpoints/12") if found else "never"
            )
            shares = []
            for _ in session.epochs(loader, steps=16):
                for batch in loader:
                    inputs, targets = batch
                    session.step(mse_loss(model(inputs), targets, reduction="none")[:, 0])
                    shares.append(batch.count)
            found[name] = {"shares": shares[-4:], "steps": len(shares), "end": flat(network)}
    (folder / f"resumed-{slow}.json").write_text(json.dumps(found))


def mixed(folder: Path) -> None:
    """Runs one rank of a world that believes that it has a CPU and a GPU."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    meet = start._rendezvous
    start._rendezvous = lambda kind, *rest: meet("cuda" if rank else kind, *rest)
    with train.join(run_dir=folder / "mixed", dtype="float64", seed=5, quiet=True) as session:
        again(session)
        network = session.place(nn.Linear(3, 1))
        model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
        loader = session.loader(numbers(24), 6)
        for _ in session.epochs(loader, 1):
            for inputs, targets in loader:
                session.step(mse_loss(model(inputs), targets, reduction="none")[:, 0])
        found: dict[str, Any] = {"mixed": session.comms.mixed}
        for much in (1e-9, 0.5):
            with torch.no_grad():
                network.weight *= 1 + much * rank
            try:
                session.verify()
                found[str(much)] = flat(network)
            except JobError as error:
                found[str(much)] = f"{error}"
        found["shard"] = refused(lambda: session.place(nn.Linear(3, 1), shard=True))
    (folder / f"mixed-{rank}.json").write_text(json.dumps(found))


def main() -> None:
    forked_worlds.run_ok(2, lambda: mixed(Path(sys.argv[1])))
    forked_worlds.run_ok(2, lambda: resumed(Path(sys.argv[1])))
    for size in SIZES:
        folder = Path(sys.argv[1]) / str(size)
        folder.mkdir()
        forked_worlds.run_ok(size, lambda folder=folder: world(folder))


if __name__ == "__main__":
    main()
