"""Runs, in forked worlds, trainings that other ranks join."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_stand_in
import forked_worlds
import one_gpu
import torch
import torch._dynamo
from shuffled_samples import Shaken
from small_launcher import Job
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.recipes import image
from paceline.recipes.optimization import Curve, make_optimizer
from paceline.recipes.options import Options
from paceline.spec.errors import JobError
from paceline.train import Best

SAMPLES, BATCH, EPOCHS = 64, 8, 5
STEPS = EPOCHS * SAMPLES // BATCH
SLOW = 0.03  # seconds per step, so that a rank has time to join


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, width), nn.Linear(width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(inputs)))


# -- faults at chosen moments -------------------------------------------------------------

At = Callable[[train.Session, str], object]
SLOT, NEWCOMER = -1, False


def nowhere(session: train.Session, where: str) -> None:
    pass


def dying(slot: int, step: int, where: str = "step", *, newcomer: bool = False) -> At:
    """Returns a function that kills a slot's process once, at a place after a number of steps."""

    def die(session: train.Session, here: str) -> None:
        this = (slot, where, newcomer) == (SLOT, here, NEWCOMER)
        mark = session.folder / f"killed.{slot}.{newcomer}"
        if this and (newcomer or session.progress.step == step) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return die


# -- trainings ---------------------------------------------------------------------------


def training(folder: Path, *, at: At = nowhere, rich: bool = False, checkpoint: str = "5",
             device: str = "cpu", communication: str = "exact", meets: bool = False,
             ) -> None:  # fmt: skip
    """Runs a whole training; its rank 0 writes the result."""
    global SLOT, NEWCOMER
    SLOT, NEWCOMER = int(os.environ["RANK"]), "PACELINE_NEWCOMER" in os.environ
    torch.set_num_threads(1)
    with train.join(run_dir=folder, dtype="float64", seed=4, log_every=4, check_every=4,
                    device="cpu" if SLOT else device) as session:  # fmt: skip
        data = Shaken(SAMPLES)
        session.agree("the data", str(len(data)))
        network = session.place(Net() if communication == "exact" else Net(1024))
        made = make_optimizer(Options(weight_decay=0.0), network, 0.01)
        curve = LambdaLR(made, Curve("cosine", STEPS, 0.1))
        plain = not rich and communication == "exact"
        network.one.requires_grad_(not plain)
        model = session.prepare(network, made, curve, communication=communication)
        kept = session.average(0.9) if rich else None
        lengths = data.lengths if rich else None
        loader = session.loader(data, BATCH, limit=2 if rich else 0, lengths=lengths)
        best, seen, passes = Best(), Seen(folder), Passes()
        if checkpoint:
            session.checkpoints(every=checkpoint, best=best, identity={"size": 8}, keep=2,
                                extras={"passes": passes} if rich else {})  # fmt: skip
        shard = session.shard(data, 5)
        evaluated(session, network, shard, nowhere)
        at(session, "door")
        for epoch in session.epochs(loader, EPOCHS, every=3 if rich else 0):
            if plain and epoch == 0:  # a newcomer skips this
                network.one.requires_grad_(True)
            if rich:
                passes.begin(network)
            for batch in loader:
                time.sleep(SLOW)
                at(session, "step")
                inputs, targets = batch
                step = session.progress.step
                if meets:
                    session.comms.barrier()
                done = session.step(cross_entropy(model(inputs), targets, reduction="none"))
                seen.note(step, session.progress.step, batch, done)
            with session.averaged():
                found = evaluated(session, network, shard, at)
            session.log("val", accuracy=found[1], seen=found[0])
            best.update(found[1], session.progress.step)
        left(session, folder, {"model": network.state_dict(), "adam": made.state_dict()["state"],
             "average": kept.state() if kept else {}})  # fmt: skip


class Passes:
    """What a script does at the start of each loop, with a state of its own."""

    number = 0

    def begin(self, network: Net) -> None:
        self.number += 1
        with torch.no_grad():
            network.one.bias.mul_(1 + 0.01 * self.number)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def phases(folder: Path, *, at: At = nowhere, wait: bool = False) -> None:
    """Runs two trainings in sequence, with other data and a smaller learning rate in the second."""
    global SLOT, NEWCOMER
    SLOT, NEWCOMER = int(os.environ["RANK"]), "PACELINE_NEWCOMER" in os.environ
    torch.set_num_threads(1)
    with train.join(run_dir=folder, dtype="float64", seed=6, log_every=4, check_every=4) as session:
        network = session.place(Net())
        adam = torch.optim.Adam(network.parameters(), 0.01)
        model, data = session.prepare(network, adam), Shaken(SAMPLES)
        for phase in (1, 2):
            loader = session.loader(data, BATCH)
            for _ in session.epochs(loader, 2 * phase):
                for inputs, targets in loader:
                    time.sleep(SLOW)
                    at(session, "step")
                    session.step(cross_entropy(model(inputs), targets, reduction="none"))
            while wait and not (folder / "ready").exists():  # a newcomer is about to join
                time.sleep(SLOW)
            data.inputs, adam.param_groups[0]["lr"] = -data.inputs, 0.002
        left(session, folder, {"model": network.state_dict(), "adam": adam.state_dict()["state"]})


def noted(job: Job, slot: int, message: dict[str, Any]) -> None:
    """Marks that a newcomer is ready; the others wait for that after the point of joining."""
    if message.get("event") == "newcomer ready":
        (job.folder / "ready").touch()


def left(session: train.Session, folder: Path, state: dict[str, Any]) -> None:
    """Verifies that all ranks have the same parameters; rank 0 saves them."""
    session.verify()
    if session.world.rank == 0:
        torch.save(state, folder / "params.pt")
    (folder / f"last.{SLOT}").write_text(
        json.dumps([session.world.rank, session.world.size, os.environ["RANK"]])
    )


class Seen:
    """Records which samples each rank trained on, by step, for batches that counted."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"ids.{os.getpid()}"

    def note(self, before: int, after: int, batch: train.Batch, done: bool) -> None:
        if done and after > before:
            ids = batch.ids[: batch.count].tolist()
            with self._path.open("a") as file:
                file.write(json.dumps([before, ids, time.monotonic()]) + "\n")


def evaluated(
    session: train.Session, network: nn.Module, shard: train.Shard, at: At
) -> tuple[int, float]:
    meter = session.meter()
    with torch.no_grad():
        for number, batch in enumerate(shard):
            at(session, f"batch {number}")
            inputs, targets = batch
            right = network(inputs).argmax(1) == targets
            meter.add(batch.count, accuracy=right.double())
    means = meter.result()
    return means.count, means["accuracy"]


def duel(folder: Path, *, at: At = nowhere) -> None:
    """Trains a generator and, within each step, a discriminator."""
    global SLOT, NEWCOMER
    SLOT, NEWCOMER = int(os.environ["RANK"]), "PACELINE_NEWCOMER" in os.environ
    torch.set_num_threads(1)
    with train.join(run_dir=folder, dtype="float64", seed=5, log_every=4, check_every=4) as session:
        judging = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
        parts = {"drawer": nn.Linear(6, 6), "judge": judging}
        modules = {name: session.place(one) for name, one in parts.items()}
        adams = {name: torch.optim.Adam(one.parameters(), 0.01) for name, one in modules.items()}
        draw, judge = (
            session.prepare(one, adams[name], name=name) for name, one in modules.items()
        )
        loader = session.loader(Shaken(SAMPLES), BATCH)
        session.checkpoints(every="epoch")
        for _ in session.epochs(loader, EPOCHS):
            for batch in loader:
                time.sleep(SLOW)
                at(session, "step")
                (inputs, _), ones = batch, torch.ones(len(batch.ids), 1, dtype=torch.float64)
                drawn = draw(inputs)
                right = _each(judge(inputs), ones) + _each(judge(drawn.detach()), 0 * ones)
                session.update("judge", right)
                at(session, "between")
                session.step({"drawer": _each(judge(drawn), ones)})
        left(session, folder, {name: one.state_dict() for name, one in modules.items()})


def _each(said: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return binary_cross_entropy_with_logits(said, right, reduction="none")[:, 0]


def recipe(folder: Path) -> None:
    """Runs the image recipe unchanged."""
    image.main([f"--run-dir={folder}", "--device=cpu", "--dtype=float64", "--steps=60"])


# -- worlds ------------------------------------------------------------------------------


def main(folder: Path, *only: str) -> None:
    """Runs all worlds; each writes its result under its name."""
    chosen: list[Callable[[], object]] = []

    def run(
        name: str, size: int, body: Callable[..., None] = training, again: int = 1,
        late: dict[int, float] | None = None, saw: Callable[..., object] | None = None,
        whole: bool = False, queued: bool = False, nccl: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        if name not in only if only else "device" in how or queued or nccl:
            return
        there = folder / name

        def on_rank() -> None:
            if queued:
                device_stand_in.use()
            if nccl:
                one_gpu.share()
            body(there, **how)

        def world() -> None:
            job = Job(on_rank, size, there, late or {}, again, whole=whole)
            job.saw = saw or job.saw
            done = job.run()
            about = {"statuses": done.statuses, "said": done.said, "lost": done.lost}
            (there / "job.json").write_text(json.dumps(about))

        chosen.append(world)

    run("plain", 2)
    run("rich", 2, rich=True)
    run("duel", 2, duel)
    run("recipe", 2, recipe)
    run("rich: first killed", 3, at=dying(0, 10), rich=True)
    run("rich: killed in an evaluation", 3, at=dying(2, 6, "batch 2"), rich=True, whole=True)
    run("rich: grown", 2, late={2: 0.2, 3: 0.3}, rich=True)
    both = dying(1, 9), dying(1, 0, "door", newcomer=True)
    run("plain: killed before it joins", 3, at=_each_of(*both), again=2)
    run("plain: killed when it joins", 3, at=dying(1, 9), again=2, saw=joining_killed)
    run("plain: without checkpoints", 2, at=dying(1, 9), checkpoint="", whole=True)
    run("plain: meets in each batch", 2, at=dying(1, 9), meets=True, whole=True)
    run("local", 2, communication="local:6")
    run("local: killed", 3, at=dying(1, 9), communication="local:6")
    run("plain: astray", 3, ending, at=_each_of(dying(1, 9), counting))
    run("plain: edited", 3, at=_each_of(dying(1, 9), edited))
    run("duel: killed between two updates", 3, duel, at=dying(0, 9, "between"), whole=True)
    run("recipe: killed", 3, recipe, saw=killed_later)
    run("phases", 2, phases)
    run("phases: killed in the second", 3, phases, at=dying(1, 20))
    run("phases: killed at the end of the first", 3, phases, at=dying(0, 15), saw=noted, wait=True)
    run("mixed", 2, device="cuda")
    run("mixed: killed", 3, at=dying(1, 9), device="cuda")
    run("mixed: first killed", 3, at=dying(0, 10), device="cuda")
    run("nccl", 2, nccl=True)
    run("nccl: killed", 3, at=dying(1, 9), nccl=True)
    run("nccl: first killed", 3, at=dying(0, 10), nccl=True)
    run("queued", 2, queued=True)
    run("queued: killed before it joins", 3, at=_each_of(*both), again=2, queued=True)
    run("queued: killed when it joins", 3, at=dying(1, 9), again=2, saw=joining_killed, queued=True)
    run("queued: another killed", 3, at=dying(1, 9), again=3, saw=another_killed, queued=True)
    run("queued: grown", 2, late={2: 0.2, 3: 0.3}, queued=True)
    run("queued rich", 2, rich=True, queued=True)
    run("queued rich: first killed", 3, at=dying(0, 10), rich=True, queued=True)
    forked_worlds.side_by_side(chosen)


def ending(folder: Path, **how: Any) -> None:
    """Trains; a rank that fails kills itself, so that it counts as lost."""
    try:
        training(folder, **how)
    except JobError as error:
        (folder / "astray").write_text(str(error))
        os.kill(os.getpid(), signal.SIGKILL)


def counting(session: train.Session, where: str) -> None:
    """Sets the learning rate by the loop's own schedule, which restarts in a newcomer."""
    if NEWCOMER and where == "step":
        for group in session.models.first.optimizer.param_groups:
            group["lr"] = 0.1


def edited(session: train.Session, where: str) -> None:
    """Changes the recorded source of a newcomer's script, as if the file had been edited."""
    if NEWCOMER and where == "door":
        session._membership.sources["__main__"] = "another"


def _each_of(*some: At) -> At:
    return lambda session, where: [one(session, where) for one in some]


def joining_killed(job: Job, slot: int, message: dict[str, Any]) -> None:
    """Kills the first newcomer when the others start to let it in."""
    ready = message.get("event") == "newcomer ready"
    if ready and len(job.events("newcomer ready")) == 1:
        os.kill(job.running[slot].pid, signal.SIGKILL)


def another_killed(job: Job, slot: int, message: dict[str, Any]) -> None:
    """Kills rank 0 when the ranks gather with the first newcomer."""
    is_joining = any(process.joining for process in job.running.values())
    if message.get("event") == "gathered" and is_joining and len(job.lost) == 1:
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(job.running[0].pid, signal.SIGKILL)


def killed_later(job: Job, slot: int, message: dict[str, Any]) -> None:
    """Kills rank 0 of the recipe after it has reported some steps."""
    if message["kind"] == "progress" and message["step"] >= 12 and not job.lost:
        with contextlib.suppress(KeyError):
            job.kill(slot)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()), *sys.argv[2:])
