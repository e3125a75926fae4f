"""Trains a GAN in forked worlds: two models, with an optimizer each."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_worlds
import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

from paceline import train
from paceline.train import parallel

SAMPLES, BATCH, EPOCHS, NOISE = 37, 8, 2, 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)


def points() -> TensorDataset:
    """Returns points on a circle."""
    angles = torch.arange(SAMPLES, dtype=torch.float64)
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))


def stream() -> train.ShardedDataset:
    """Returns the same points in shards; each rank reads its own samples."""
    folder = Path(sys.argv[1]) / "shards"
    if not folder.is_dir():
        samples = ({"npy": point.numpy()} for point in points().tensors[0])
        assert len(train.write_shards(folder, samples, size=8 << 10)) > 2
    return train.ShardedDataset(folder, lambda sample: train.decoded(sample)["npy"], window=16)


def layers(inputs: int, outputs: int, norm: bool) -> nn.Module:
    middle = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(inputs, 16), *middle, nn.Tanh(), nn.Linear(16, outputs))


def scores(network: nn.Module, inputs: Tensor, real: float) -> Tensor:
    outputs = network(inputs)[:, 0]
    return bce(outputs, torch.full_like(outputs, real), reduction="none")


def gan(
    folder: Path,
    *,
    at_step: Callable[[int], None] = lambda step: None,
    together: bool = False,
    limit: int = 0,
    shard: bool = False,
    norm: bool = False,
    every: str = "3",
    dtype: str = "float64",
) -> None:
    """Runs the whole training; leaves all weights and the average in ``folder/params.pt``.

    Args:
        at_step: Called before each step ends, with the number of completed steps.
        together: Compute both models' gradients before either is updated.
    """
    torch.set_num_threads(1)
    with train.join(run_dir=folder, dtype=dtype, seed=4, log_every=3, check_every=4) as session:
        torch.manual_seed(1)
        generator = session.place(layers(NOISE, 2, norm), shard=shard)
        discriminator = session.place(layers(2, 1, norm), shard=shard)
        first = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
        second = torch.optim.SGD(discriminator.parameters(), lr=0.1, momentum=0.9)
        make = session.prepare(generator, first, ExponentialLR(first, 0.9), name="generator")
        judge = session.prepare(discriminator, second, clip_norm=0.3, name="discriminator")
        average = session.average(0.8, start=2, name="generator")
        loader = session.loader(stream(), BATCH, limit=limit)
        session.watch(every=3, devices=True)
        session.checkpoints(every=every)
        for _ in session.epochs(loader, EPOCHS):
            for batch in loader:
                (real,) = batch
                made = make(torch.from_numpy(batch.draws.normal(NOISE)).to(real))
                doubts = scores(judge, real, 1) + scores(judge, made.detach(), 0)
                if together:
                    at_step(session.progress.step)
                    session.step({"discriminator": doubts, "generator": scores(judge, made, 1)})
                    continue
                session.update("discriminator", doubts)
                at_step(session.progress.step)
                session.step({"generator": scores(judge, made, 1)})
            with average.applied():
                session.log("val", spread=spread(session, generator))
        session.save_model({"task": "gan"}, name="generator", average=True)
        state = parallel.full_state(session.models.module)
        kept = average.state()["tensors"]
        if session.world.rank == 0:
            state |= {f"average.{name}": one for name, one in kept.items()}
            torch.save(state, folder / "params.pt")


@torch.inference_mode()
def spread(session: train.Session, generator: nn.Module) -> float:
    """Returns the mean radius of generated points."""
    generator.eval()
    meter = session.meter()
    for batch in session.shard(points(), 4):
        noise = batch.data[0][:, :1].expand(-1, NOISE)
        meter.add(batch.count, radius=generator(noise).norm(dim=1))
    generator.train()
    return meter.result()["radius"]


def made(name: str) -> Path:
    folder = Path(sys.argv[1]) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def difference(one: Path, other: Path) -> float:
    """Returns the largest difference of any tensor; 0.0 only if all bits are equal."""
    ours, theirs = (torch.load(folder / "params.pt") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("average.") for name in ours)
    if all(torch.equal(ours[name], theirs[name]) for name in ours):
        return 0.0
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def killer(step: int) -> Callable[[int], None]:
    """Returns a function that kills the last rank in the middle of the next step."""

    def act(done: int) -> None:
        if done == step and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def worlds() -> dict[str, float]:
    """Trains the same on 1, 2 and 4 ranks."""
    for size in (1, 2, 4):
        forked_worlds.run_ok(size, lambda size=size: gan(made(f"alternating{size}")))
    return {
        str(size): difference(made(f"alternating{size}"), made("alternating1")) for size in (2, 4)
    }


def together() -> dict[str, float]:
    """Computes both gradients before an update: whole, accumulated, and with sharded models."""
    forked_worlds.run_ok(1, lambda: gan(made("together"), together=True))
    ways: dict[str, dict[str, Any]] = {
        "in pieces": {"limit": 2},
        "sharded": {"shard": True},
        "sharded in pieces": {"shard": True, "limit": 1},
    }
    for name, way in ways.items():
        forked_worlds.run_ok(2, lambda name=name, way=way: gan(made(name), together=True, **way))
    return {name: difference(made(name), made("together")) for name in ways}


def resumed() -> dict[str, Any]:
    """Kills trainings between a step's two updates, and resumes them."""
    found = {}
    for size, step in ((1, 7), (2, 4)):
        folder = made(f"killed{size}")
        forked_worlds.run(size, lambda folder=folder, step=step: gan(folder, at_step=killer(step)))
        forked_worlds.run_ok(size, lambda folder=folder: gan(folder))
        found[f"at {size}"] = difference(folder, made(f"alternating{size}"))
    return found


def moved() -> float:
    """Resumes the shards of two ranks on one rank without sharding."""
    folder = made("moved")
    forked_worlds.run(2, lambda: gan(folder, together=True, shard=True, at_step=killer(7)))
    forked_worlds.run_ok(1, lambda: gan(folder, together=True))
    return difference(folder, made("together"))


def with_statistics() -> list[float]:
    """Trains with batch statistics, which differ by rank; the models stay equal."""
    forked_worlds.run_ok(2, lambda: gan(made("norm"), norm=True))
    return [record["spread"] for record in records(made("norm")) if record["split"] == "val"]


def page() -> int:
    """Runs the tutorial's script on two ranks; returns its weight average's number of updates."""
    text = (Path(__file__).parents[2] / "docs/tutorial/training-session.md").read_text(
        encoding="utf-8"
    )
    script = text.split("```python file=gan.py\n")[1].split("```")[0]
    folder = made("page")
    forked_worlds.run_ok(2, lambda: exec(script, {"__name__": "__main__"}), {
        "PACELINE_RUN_DIR": str(folder)})  # fmt: skip
    state = json.loads((folder / "checkpoints/48/state.json").read_text())
    return int(state["training"]["models"]["generator"]["average"]["updates"])


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    stream()
    scenarios = [worlds, together, resumed, moved, with_statistics, page]
    found = {one.__name__: one() for one in scenarios}
    found["records"] = {str(n): records(made(f"alternating{n}")) for n in (1, 2)}
    (Path(sys.argv[1]) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
