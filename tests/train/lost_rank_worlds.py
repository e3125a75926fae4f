"""Runs trainings that lose ranks, and the same trainings without losses."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import device_stand_in
import forked_worlds
import local_ranks
import one_gpu
import torch
import torch._dynamo
from loss_launcher import Launcher
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import spectral_norm
from unused_parameters import Branches

from paceline import train
from paceline.train import files
from paceline.train.reduce.local import Local

SAMPLES, BATCH, EPOCHS, HELD_BACK = 72, 12, 4, 25
BEHIND = 8  # the step after which a barrier appears to fail on one rank
LONGER_S = 0.03  # pause after each step, so that ranks have time to die
Kills = Callable[[str, int], bool]
"""Whether this rank is to die at this moment of this step."""


class Noisy:
    """Samples with an augmentation: noise from torch's generator."""

    def __init__(self, count: int, noise: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, 3, dtype=torch.float64, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        one = self.inputs[number]
        return one + self.noise * torch.randn(3, dtype=torch.float64), one.sum(0, keepdim=True) ** 2


def flat(*modules: nn.Module) -> list[float]:
    own = [one.detach().flatten() for module in modules for one in module.parameters()]
    return torch.cat(own).tolist()


def network(*extra: nn.Module, width: int = 8) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, width), *extra, nn.Tanh(), nn.Linear(width, 1)).double()


class Cooling(nn.Module):
    """Scales its input by buffers: each forward pass changes one, the training loop the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(3))
        self.register_buffer("heat", torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        self.passes += 1
        return values * (1 + self.heat * self.passes.mean() / 100)

    def cool(self) -> None:
        self.heat = self.heat * 0.98


def one_model(session: train.Session, dies: Kills, **how: Any) -> dict[str, Any]:
    """Trains with Adam, augmentation, averaged weights, evaluations and checkpoints."""
    made = network(*how.get("extra", ()), width=how.get("width", 8))
    net = session.place(Branches() if how.get("unused") else made)
    if "communication" in how:
        at_meetings(session, dies)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    kept = {name: how[name] for name in ("unused", "communication") if name in how}
    model = session.prepare(net, optimizer, schedule, clip_norm=1.0, **kept)
    average = session.average(0.9) if "communication" not in how else None
    session.save_config({"kind": "none"})
    loader = session.loader(
        Noisy(SAMPLES, 0.1), BATCH, limit=how.get("limit", 0), balance=how.get("balance", "even")
    )
    held_back = Noisy(HELD_BACK, 0.0)
    if how.get("checkpoints", True):
        session.checkpoints(every="5")
    done, ends, means = [], [], []
    for _ in session.epochs(loader, EPOCHS):
        for batch in loader:
            inputs, targets = batch
            step = session.progress.step
            dies("given", step)
            if how.get("grouped") and session.world.size > 1:
                session.comms.new_group()
            outputs = model(inputs, step) if how.get("unused") else model(inputs)
            dies("forward", step)
            losses = mse_loss(outputs, targets, reduction="none")[:, 0]
            if session.step(losses, square=losses.detach() ** 2):
                done.append(session.progress.step)
                ends.append(time.monotonic())
                dies("stepped", step)
                for one in how.get("extra", ()):
                    one.cool()
                if how.get("behind") and session.progress.step == BEHIND:
                    come_behind(session, how["behind"])
                if len(done) > 1:
                    time.sleep(how.get("pause", 0.002))
        meter = session.meter()
        with average.applied() if average else contextlib.nullcontext(), torch.inference_mode():
            for number, batch in enumerate(session.shard(held_back, 3)):
                dies(f"evaluating {number}", session.progress.step)
                value = batch.data[1][:, 0]
                meter.add(batch.count, value=value)
        found = meter.result()
        dies("evaluated", session.progress.step)
        if how.get("once"):
            made_once(session, dies, ("waiting", session.progress.step) in how["kills"].values())
        means.append([found.count, found["value"]])
    session.verify()
    with half_written(lambda: dies("saving", session.progress.step)):
        session.save_model({"kind": "none"})
    loss = held_back_loss(net, held_back) if "communication" in how else 0.0
    names = [one.name for one in session.folder.iterdir()]
    made = [name for name in names if "made" in name or name.startswith(".paceline-")]
    return {"end": flat(net), "done": done, "ends": ends, "means": means, "loss": loss,
            "made": sorted(made)}  # fmt: skip


@torch.no_grad()
def held_back_loss(net: nn.Module, data: Noisy) -> float:
    inputs, targets = zip(*(data[number] for number in range(len(data))), strict=True)
    device = next(net.parameters()).device
    return float(mse_loss(net(torch.stack(inputs).to(device)), torch.stack(targets).to(device)))


def at_meetings(session: train.Session, dies: Kills) -> None:
    """Lets ranks die after the exchange of local progress, before the outer step."""
    go = Local._outer_step

    def going(*what: Any) -> None:
        dies("meeting", session.progress.step)
        go(*what)

    Local._outer_step = going  # type: ignore[method-assign]


def come_behind(session: train.Session, slot: int) -> None:
    """All ranks reach a barrier, but it appears to fail on one of them."""
    act = session.comms.barrier
    if session.world.rank == slot:
        rows = type(session.comms)._rows

        def cut_short(comms: Any, vector: Tensor) -> Tensor:
            type(session.comms)._rows = rows  # type: ignore[method-assign]
            rows(comms, vector)
            raise RuntimeError("Connection closed by peer")

        type(session.comms)._rows = cut_short  # type: ignore[method-assign]
    act()


def made_once(session: train.Session, dies: Kills, one_waits: bool) -> None:
    """One rank makes a file; it dies meanwhile, or another rank that waits for the file dies."""
    step, begun = session.progress.step, session.folder / f"begun-{session.progress.step}"

    def make(to: Path) -> None:
        (to / "file").write_text("half")
        begun.touch()
        dies("making", step)
        while one_waits and not lost_one(session):
            time.sleep(0.005)
        (to / "file").write_text("whole")

    def look_on() -> None:
        while not begun.exists():
            time.sleep(0.005)
        dies("waiting", step)

    if one_waits:
        threading.Thread(target=look_on, daemon=True).start()
    session.once(session.folder / f"made-{step}", make)
    assert (session.folder / f"made-{step}" / "file").read_text() == "whole"


def lost_one(session: train.Session) -> bool:
    """Returns whether this rank knows of a loss and is still in the former group."""
    recovery = session._membership.recovery
    return recovery is not None and recovery._control.newer(recovery.generation) is not None


@contextlib.contextmanager
def half_written(act: Callable[[], object]) -> Iterator[None]:
    """Within the ``with`` block, calls a function when weights are written but not renamed yet."""
    replace = files.replace

    def named(source: Path, target: Path) -> None:
        if target.name == "model.safetensors":
            act()
        replace(source, target)

    files.replace = named
    try:
        yield
    finally:
        files.replace = replace


def two_models(session: train.Session, dies: Kills, **how: Any) -> dict[str, Any]:
    """Trains two models; one is updated within the step of the other, like a discriminator."""
    first, second = session.place(network()), session.place(network())
    spectral_norm(first[0])
    one = session.prepare(first, torch.optim.Adam(first.parameters(), lr=0.01), name="one")
    two = session.prepare(second, torch.optim.Adam(second.parameters(), lr=0.01), name="two")
    loader = session.loader(Noisy(SAMPLES, 0.1), BATCH)
    done, ends = [], []
    for _ in session.epochs(loader, EPOCHS):
        for inputs, targets in loader:
            step = session.progress.step
            dies("given", step)
            losses = mse_loss(one(inputs), targets, reduction="none")[:, 0]
            session.update("one", losses)
            dies("forward", step)
            losses = mse_loss(two(inputs), one(inputs).detach(), reduction="none")[:, 0]
            if session.step({"two": losses}):
                done.append(session.progress.step)
                ends.append(time.monotonic())
                dies("stepped", step)
                time.sleep(how.get("pause", 0.0))
    session.verify()
    return {"end": flat(first, second), "done": done, "ends": ends}


WIDE = {"width": 2048}  # wide enough for compressed gradients
WAYS: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, Any]]] = {
    "plain": (one_model, {}),
    "accumulated": (one_model, {"limit": 2}),
    "unused": (one_model, {"unused": True}),
    "buffers": (one_model, {"extra": (Cooling(),)}),
    "two models": (two_models, {}),
    "coded": (one_model, {"communication": "int8"}),
    "local": (one_model, {"communication": "local:3", **WIDE}),
    "local, behind": (one_model, {"communication": "local:9", "behind": 2, **WIDE}),
    "grouped": (one_model, {"grouped": True, "once": True}),
    "shared": (one_model, {"balance": {"n1": 1.0}}),
    "disks apart": (one_model, {"checkpoints": False, "apart": True}),
    "mixed": (one_model, {"device": "cuda"}),  # of rank 0; the other ranks compute on CPUs
}
# ways that are run with a stand-in for a device's collectives, or on GPUs
QUEUED = ["plain", "accumulated", "unused", "buffers", "two models", "coded", "local", "wide"]
WAYS["wide"] = one_model, {"extra": (Cooling(),), "width": 60_000, "communication": "exact"}
WAYS |= {f"queued: {name}": (WAYS[name][0], WAYS[name][1] | {"queued": True}) for name in QUEUED}
WAYS |= {f"nccl: {name}": (WAYS[name][0], WAYS[name][1] | {"nccl": True}) for name in QUEUED}


def rank(
    way: str, folder: Path, kills: dict[int, tuple[str, int]], **more: Any
) -> Callable[[int], None]:
    """Returns what a rank does: it trains and writes its result."""
    make, how = WAYS[way]
    how = how | more

    def body(slot: int) -> None:
        faulthandler.register(signal.SIGUSR1)
        torch.set_num_threads(1)
        os.environ["PACELINE_HOST"] = "n1"
        if how.get("queued"):
            device_stand_in.use()
        if how.get("nccl"):
            one_gpu.share()

        def dies(moment: str, step: int) -> bool:
            if kills.get(slot) == (moment, step):
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        device = how.get("device", "cpu") if slot == 0 else "cpu"
        run = folder / (f"run{slot}" if how.get("apart") else "run")
        session = train.join("losing", dtype="float64", run_dir=run, log_every=4,
                             check_every=7, device=device)  # fmt: skip
        with session:
            found = make(session, dies, kills=kills, **how)
        (folder / f"{slot}.json").write_text(json.dumps(found))

    return body


def alone(way: str, folder: Path) -> dict[str, Any]:
    """Trains in one process."""
    pid = os.fork()
    if not pid:
        with contextlib.redirect_stdout(io.StringIO()):
            rank(way, folder, {})(0)
        os._exit(0)
    os.waitpid(pid, 0)
    return dict(json.loads((folder / "0.json").read_text()))


def trial(
    way: str,
    size: int,
    folder: Path,
    kills: dict[int, tuple[str, int]] | None = None,
    act: Callable[[Launcher], None] = lambda _: None,
    timeout: float = local_ranks.LIMIT_S,
    **more: Any,
) -> dict[str, Any]:
    """Trains while ranks die at these moments; returns what became of the others."""
    folder.mkdir(parents=True)
    launcher = Launcher(size, rank(way, folder, kills or {}, **more), folder)
    statuses = launcher.run(timeout, act)
    found = {
        slot: json.loads((folder / f"{slot}.json").read_text())
        for slot in range(size)
        if (folder / f"{slot}.json").exists()
    }
    ends = [end for one in found.values() for end in one["ends"] if end > launcher.last_loss]
    said = [one for some in launcher.ranks for one in some.said if one["kind"] == "event"]
    return {
        "statuses": statuses,
        "found": found,
        "gap": min(ends) - launcher.last_loss if ends and launcher.last_loss else None,
        "regrouped": [one for one in said if one["event"] == "regrouped"],
        "interrupted": [one for one in said if one["event"] == "interrupted"],
        "recoverable": [one for one in said if one["event"] == "recoverable"],
        "saved": [one for one in said if one["event"] == "model saved"],
        "kept": {
            run.name: sorted(one.name for one in (run / "model").iterdir())
            for run in folder.glob("run*")
            if (run / "model").exists() and (run / "config.json").exists()
        },
        "logs": {slot: (folder / f"{slot}.log").read_text()[-3000:] for slot in range(size)},
    }


def at_random(seed: int, way: str, size: int, folder: Path) -> dict[str, Any]:
    """Kills ranks at random moments: one rank, two at once, or one and then another."""
    chance = random.Random(seed)
    lost = chance.sample(range(size), chance.choice([1, 1, 2]) if size > 2 else 1)
    first = chance.uniform(0.0, 0.6)
    then = first + chance.choice([0.0, 0.0, 0.005, 0.02, 0.05, 0.2])
    moments = [(first, lost[0]), *((then, one) for one in lost[1:])]
    begun = 0.0

    def act(launcher: Launcher) -> None:
        nonlocal begun
        trains = [one for one in launcher.ranks if any(
            said.get("event") == "recoverable" for said in one.said)]  # fmt: skip
        if not begun and len(trains) == size:
            begun = time.monotonic()
        while begun and moments and time.monotonic() - begun > moments[0][0]:
            launcher.kill(moments.pop(0)[1])

    return {"seed": seed, "way": way, "size": size, "lost": lost, "first": first, "then": then,
            **trial(way, size, folder, act=act, pause=LONGER_S)}  # fmt: skip


def frozen(way: str, size: int, folder: Path, slot: int, after: float) -> dict[str, Any]:
    """Freezes a rank a number of seconds after the first step, for good."""
    begun = 0.0

    def act(launcher: Launcher) -> None:
        nonlocal begun
        said = [one for some in launcher.ranks for one in some.said]
        if not begun and any(one["kind"] == "progress" and one["step"] > 1 for one in said):
            begun = time.monotonic()
        if begun and time.monotonic() - begun > after and not launcher.ranks[slot].frozen:
            launcher.freeze(slot)

    return trial(way, size, folder, act=act, pause=LONGER_S)


def main(folder: Path, what: str, *args: str) -> None:
    """Prints the result of each training, in the order of ``args``."""
    torch.set_num_threads(1)
    asked = [json.loads(name) for name in filter(None, args)]
    forked_worlds.side_by_side(
        lambda way=way: train_alone(folder, way) for way in dict.fromkeys(way for way, *_ in asked)
    )
    results = [folder / f"{what} {number}.json" for number in range(len(asked))]
    forked_worlds.side_by_side(
        lambda one=one, result=result: result.write_text(
            json.dumps(tried(what, result.with_suffix(""), *one))
        )
        for one, result in zip(asked, results, strict=True)
    )
    for result in results:
        print(result.read_text(), flush=True)


def train_alone(folder: Path, way: str) -> None:
    (folder / f"alone {way}").mkdir()
    (folder / f"alone-{way}.json").write_text(json.dumps(alone(way, folder / f"alone {way}")))


def tried(what: str, folder: Path, way: str, size: int, *rest: Any) -> dict[str, Any]:
    if what == "random":
        return at_random(rest[0], way, size, folder)
    if what == "frozen":
        return frozen(way, size, folder, *rest)
    kills = {int(slot): (moment, step) for slot, moment, step in rest[0]}
    return trial(way, size, folder, kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
