"""Compares interrupted and resumed trainings with whole ones, in forked worlds."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_worlds
import torch
import torch._dynamo
import torch.distributed.checkpoint as dcp
from shuffled_samples import Shaken
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.recipes.optimization import Curve, make_optimizer
from paceline.recipes.options import Options
from paceline.train import Best, parallel
from paceline.train.checkpoints.capture import Snapshot
from paceline.train.checkpoints.resume import load
from paceline.train.checkpoints.store import Store
from paceline.train.checkpoints.writer import Writer
from paceline.train.comms import Comms
from paceline.train.world import World

ALONE = Comms(World(), torch.device("cpu"))
SAMPLES, BATCH, EPOCHS = 37, 8, 3
KILLS, KILLS_IN_SAVES = 4, 20
STEPS = EPOCHS * -(-SAMPLES // BATCH)


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 64), nn.Linear(64, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.two(self.dropout(torch.tanh(self.one(inputs))))


def training(
    folder: Path,
    *,
    every: str = "3",
    resume: str = "auto",
    dropout: float = 0.0,
    shard: bool = False,
    at_step: Callable[[int], None] = lambda step: None,
    stop_when_full: bool = False,
    save: bool = True,
    diverge_at: int = -1,
    stream: bool = False,
) -> None:
    """Runs the whole training of these tests; leaves its parameters in ``folder/params.pt``."""
    torch.set_num_threads(1)
    with train.join(run_dir=folder, dtype="float64", seed=4, log_every=4, check_every=4) as session:
        network = session.place(Net(dropout), shard=shard)
        made = make_optimizer(Options(weight_decay=0.0), network, 0.01)
        model = session.prepare(network, made, LambdaLR(made, Curve("cosine", STEPS, 0.1)))
        data = streamed() if stream else Shaken(SAMPLES)
        loader = session.loader(data, BATCH)
        best = Best()
        session.checkpoints(
            every=every, resume=resume, best=best, identity={"size": 8}, keep=2,
            stop_when_full=stop_when_full,
        )  # fmt: skip
        for _ in session.epochs(loader, EPOCHS):
            for batch in loader:
                inputs, targets = batch
                note_ids(folder, session, batch)
                session.step(cross_entropy(model(inputs), targets, reduction="none"))
                at_step(session.progress.step)
                if session.progress.step == diverge_at and session.world.rank == 1:
                    network.two.bias.data += 1e-15
            best.update(evaluated(session, network, data), session.progress.step)
        state = parallel.full_state(network)
        if session.world.rank == 0 and save:
            torch.save(state, folder / "params.pt")


def note_ids(folder: Path, session: train.Session, batch: train.Batch) -> None:
    with (folder / f"ids.{session.world.rank}").open("a") as file:
        ids = batch.ids[: batch.count].tolist()
        file.write(json.dumps([session.progress.step, session.world.size, ids]) + "\n")


def streamed() -> train.ShardedDataset:
    """Returns the same samples in shards; the noise comes from the process's generator."""

    def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
        inputs = torch.from_numpy(train.decoded(sample)["npy"])
        return inputs + 0.1 * torch.randn(6, dtype=torch.float64), int(sample["cls"])

    return train.ShardedDataset(made("shards of tar"), decode, together=3, window=8)


def evaluated(session: train.Session, network: nn.Module, data: Any) -> float:
    meter = session.meter()
    network.eval()
    with torch.inference_mode():
        for batch in session.shard(data, 4):
            inputs, targets = batch
            meter.add(batch.count, hit=network(inputs).argmax(1) == targets)
    network.train()
    return meter.result()["hit"]


def made(name: str) -> Path:
    folder = Path(sys.argv[1]) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def ids_by_step(folder: Path) -> dict[int, list[int]]:
    """Returns the sample ids of each global step over all ranks; the last ones if repeated."""
    noted: dict[tuple[int, int, int], list[int]] = {}
    sizes: dict[int, int] = {}
    for path in folder.glob("ids.*"):
        rank = int(path.suffix[1:])
        for line in path.read_text().splitlines():
            step, size, ids = json.loads(line)
            noted[step, size, rank] = ids
            sizes[step] = size if rank == 0 else sizes.get(step, size)
    return {
        step: [number for rank in range(size) for number in noted[step, size, rank]]
        for step, size in sizes.items()
    }


def difference(one: Path, other: Path) -> float:
    """Returns the largest difference of any parameter; 0.0 only if all bits are equal."""
    ours, theirs = torch.load(one / "params.pt"), torch.load(other / "params.pt")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def killer(step: int, number: int) -> Callable[[int], None]:
    """Returns a function that sends this process a signal right after a step."""

    def act(done: int) -> None:
        if done == step:
            os.kill(os.getpid(), number)

    return act


def at_other_worlds() -> dict[str, Any]:
    """Trains without interruption on 1, 2 and 4 ranks."""
    found = {}
    for size in (1, 2, 4):
        forked_worlds.run_ok(size, lambda size=size: training(made(f"whole{size}"), every="never"))
        found[str(size)] = [
            difference(made(f"whole{size}"), made("whole1")),
            ids_by_step(made(f"whole{size}")) == ids_by_step(made("whole1")),
        ]
    return found


def killed_and_resumed() -> list[float]:
    """Kills trainings at random steps and resumes them; returns differences from the whole run."""
    draw = random.Random(int(sys.argv[2]))
    differences = []
    for number in range(KILLS):
        folder, step = made(f"killed{number}"), draw.randrange(1, STEPS)
        every = str(draw.randrange(1, 6))
        statuses = forked_worlds.run(
            1,
            lambda f=folder, s=step, e=every: training(
                f, every=e, at_step=killer(s, signal.SIGKILL)
            ),
        )
        assert statuses == [-signal.SIGKILL]
        forked_worlds.run_ok(1, lambda f=folder, e=every: training(f, every=e))
        differences.append(difference(folder, made("whole1")))
        assert ids_by_step(folder) == ids_by_step(made("whole1"))
    return differences


def terminated_and_resumed() -> dict[str, Any]:
    """Sends SIGTERM to one of four ranks, with dropout; then SIGUSR1 during the resumed run."""
    forked_worlds.run_ok(4, lambda: training(made("dropped"), every="never", dropout=0.3))
    folder = made("terminated")

    def act(step: int) -> None:
        if os.environ["RANK"] == "1":
            killer(6, signal.SIGTERM)(step)
        time.sleep(0.15 if step >= 6 else 0)  # so that the resumed part lasts longer than two polls

    slow = forked_worlds.run(4, lambda: training(folder, every="never", dropout=0.3, at_step=act))
    steps = [one.step for one in Store(folder / "checkpoints").scan()[0]]
    forked_worlds.run_ok(4, lambda: training(folder, every="never", dropout=0.3))
    return {
        "statuses": slow,
        "steps": steps,
        "difference": difference(folder, made("dropped")),
        "ids": ids_by_step(folder) == ids_by_step(made("dropped")),
    }


def through_worlds() -> dict[str, Any]:
    """Trains on 4, 2, 1 and again 4 ranks; all but the last run are killed."""
    folder = made("worlds")
    for size, step in ((4, 3), (2, 6), (1, 11)):
        forked_worlds.run(
            size, lambda s=step: training(folder, every="1", at_step=killer(s, signal.SIGKILL))
        )
    forked_worlds.run_ok(4, lambda: training(folder, every="1"))
    sizes = {json.loads(line)[1] for line in (folder / "ids.0").read_text().splitlines()}
    return {
        "difference": difference(folder, made("whole1")),
        "ids": ids_by_step(folder) == ids_by_step(made("whole1")),
        "sizes": sorted(sizes),
    }


def streams() -> dict[str, Any]:
    """Trains from shards on 1 and 2 ranks; kills and resumes on the same and on another number."""
    data = Shaken(SAMPLES)
    labels = (data.inputs[:, 0] > data.inputs[:, 1]).tolist()
    samples = ({"npy": one, "cls": int(label)} for one, label in zip(data.inputs, labels))  # noqa: B905
    packed = train.write_shards(made("shards of tar"), samples, size=14_000)
    wholes = {size: made(f"stream{size}") for size in (1, 2)}
    for size, folder in wholes.items():
        forked_worlds.run_ok(size, lambda f=folder: training(f, every="never", stream=True))
    again = {size: made(f"stream2 resumed at {size}") for size in (2, 4)}
    for size, folder in again.items():
        forked_worlds.run(
            2,
            lambda f=folder: training(f, every="3", stream=True, at_step=killer(8, signal.SIGKILL)),
        )
        forked_worlds.run_ok(size, lambda f=folder: training(f, every="3", stream=True))
    folders = [*wholes.values(), *again.values()]
    return {
        "shards": len(packed),
        "ids": all(ids_by_step(folder) == ids_by_step(wholes[1]) for folder in folders),
        "once": sorted(n for step in range(5) for n in ids_by_step(wholes[2])[step])
        == list(range(SAMPLES)),
        "worlds": max(difference(folder, wholes[1]) for folder in folders),
        "resumed": difference(again[2], wholes[2]),
    }


def private_disks() -> dict[str, Any]:
    """Each rank has its own folder; the checkpoint is moved from rank 0's to rank 1's."""
    folder = made("private")

    def own() -> Path:
        return made(f"private/{os.environ['RANK']}")

    forked_worlds.run(2, lambda: training(own(), every="2", at_step=killer(7, signal.SIGKILL)))
    (folder / "0/checkpoints").rename(folder / "1/checkpoints")
    forked_worlds.run_ok(2, lambda: training(own(), every="never"))
    return {
        "difference": difference(folder / "0", made("whole1")),
        "resumed": [resumed_at(folder / "0")],
    }


def sharded() -> dict[str, Any]:
    """Resumes an FSDP2 training of two ranks with DDP on one rank, and the other way round."""
    folder = made("sharded")
    forked_worlds.run(
        2, lambda: training(folder, every="3", shard=True, at_step=killer(7, signal.SIGKILL))
    )
    again = forked_worlds.run(
        1, lambda: training(folder, every="3", at_step=killer(10, signal.SIGKILL))
    )
    assert again == [-signal.SIGKILL]
    forked_worlds.run_ok(2, lambda: training(folder, every="3", shard=True))
    return {"difference": difference(folder, made("whole1"))}


def shards() -> dict[str, Any]:
    """Each rank saves its own shards: resumed at the same and another size, and damaged."""
    forked_worlds.run_ok(2, lambda: training(made("fsdp"), every="never", shard=True))
    return {
        "same": difference(resumed_from_shards("shards2", 2), made("fsdp")),
        "more": difference(resumed_from_shards("shards4", 4), made("fsdp")),
        "damaged": difference(resumed_from_shards("damaged", 2, damage), made("fsdp")),
        "steps": [resumed_at(made(name)) for name in ("shards2", "shards4", "damaged")],
        "warnings": sum("skipped" in one["event"] for one in events(made("damaged"))),
        "files": held(made("shards2")),
        "by torch": read_by_torch(made("shards2")),
    }


def resumed_from_shards(
    name: str, size: int, before: Callable[[Path], None] = lambda folder: None
) -> Path:
    """Kills two ranks after step 8, then trains to the end on ``size`` ranks."""
    folder = made(name)

    def kill(step: int) -> None:
        while step == 8 and not (folder / "checkpoints/6").exists():
            time.sleep(0.01)
        killer(8, signal.SIGKILL)(step)

    forked_worlds.run(2, lambda: training(folder, every="3", shard=True, at_step=kill))
    before(folder)
    forked_worlds.run_ok(size, lambda: training(folder, every="3", shard=True))
    return folder


def damage(folder: Path) -> None:
    """Flips one bit of what rank 1 has written."""
    newest = Store(folder / "checkpoints").scan()[0][0].path
    part = newest / "weights/00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def resumed_at(folder: Path) -> int:
    return next(one["step"] for one in events(folder) if one["event"] == "resumed")


def held(folder: Path) -> list[str]:
    newest = Store(folder / "checkpoints").scan()[0][0]
    return sorted(newest.manifest.files)


def read_by_torch(folder: Path) -> float:
    """Reads the last checkpoint's weights with torch's reader only; returns the difference."""
    whole = torch.load(folder / "params.pt")
    state = {name: torch.zeros_like(one) for name, one in whole.items()}
    path = Store(folder / "checkpoints").scan()[0][0].path / "weights"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    return max(float((state[name] - whole[name]).abs().max()) for name in whole)


def shards_on_private_disks() -> dict[str, Any]:
    """What one disk holds is sent over the network: the whole state one way, shards the other."""
    root = made("private shards")

    def own(at_step: Callable[[int], None] = lambda step: None) -> None:
        rank = os.environ["RANK"]
        hide(root / ("1" if rank == "0" else "0"))
        training(root / rank, every="3", shard=True, at_step=at_step)

    for rank in range(2):
        (root / str(rank)).mkdir()
    forked_worlds.run(2, lambda: own(killer(8, signal.SIGKILL)))
    shutil.copytree(made("shards2") / "checkpoints", root / "1/checkpoints")
    shutil.rmtree(Store(root / "1/checkpoints").scan()[0][0].path)
    private = held(root / "0")
    shutil.rmtree(root / "0/checkpoints")
    forked_worlds.run_ok(2, own)
    return {
        "private": private,
        "moved": held(root / "1"),
        "step": resumed_at(root / "0"),
        "difference": difference(root / "0", made("fsdp")),
    }


def hide(folder: Path) -> None:
    """Makes a folder empty for this process alone, like another host's disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_users, private, recursive = 0x20000, 0x10000000, 1 << 18, 1 << 14
    users = 0 if os.geteuid() == 0 else new_users
    done = [
        libc.unshare(new_mounts | users),
        libc.mount(b"none", b"/", None, private | recursive, None),
        libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, None),
    ]
    assert not any(done), os.strerror(ctypes.get_errno())


def records() -> dict[str, Any]:
    """Returns the log of a run that was killed twice and that of a whole run."""
    folder = made("logged")
    for step in (7, 12):
        forked_worlds.run(
            1, lambda s=step: training(folder, every="5", at_step=killer(s, signal.SIGKILL))
        )
    forked_worlds.run_ok(1, lambda: training(folder, every="5"))
    return {"killed": logged(folder), "whole": logged(made("whole1"))}


def logged(folder: Path) -> list[Any]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    return [
        [one["split"], one["step"], one["samples"], one["loss"]]
        for one in said
        if one["split"] != "pace"
    ]


def other_choices() -> dict[str, Any]:
    """Resumes by other choices: never, a step, a path, another identity, a folder in use."""
    folder = made("choices")
    forked_worlds.run(1, lambda: training(folder, every="2", at_step=killer(9, signal.SIGKILL)))
    with_path = made("by path")
    forked_worlds.run_ok(1, lambda: training(with_path, every="never", resume=str(folder)))
    forked_worlds.run_ok(1, lambda: training(folder, every="never", resume="6"))
    found = {
        "path": difference(with_path, made("whole1")),
        "step": difference(folder, made("whole1")),
        "missing": forked_worlds.run(1, lambda: training(folder, resume="5")),
    }
    holder = forked_worlds.start(
        1, lambda: training(made("held"), every="1", at_step=lambda n: time.sleep(200 * (n > 2)))
    )
    while not list(made("held").glob("checkpoints/*/manifest.json")):
        time.sleep(0.01)
    found["held"] = forked_worlds.run(1, lambda: training(made("held")))
    os.kill(holder[0], signal.SIGKILL)
    forked_worlds.finish(holder)
    forked_worlds.run_ok(1, lambda: training(made("held"), resume="never"))
    found["anew"] = difference(made("held"), made("whole1"))
    found["aside"] = len(list(made("held").glob("checkpoints-before-*")))
    return found


def killed_in_saves() -> dict[str, Any]:
    """Kills processes at random moments while they write checkpoints without pause."""
    draw = random.Random(int(sys.argv[2]))
    where = Store(made("torn/checkpoints"))
    passed_over: list[str] = []
    steps = []
    for number in range(KILLS_IN_SAVES):
        pids = forked_worlds.start(1, lambda n=number: saving(where, 1000 * n + 1))
        while not any(
            int(path.parent.name.partition(".")[0]) > 1000 * number
            for path in where.root.glob("[0-9]*/manifest.json")
        ):
            time.sleep(0.002)  # one is complete, and the next is being written
        time.sleep(draw.uniform(0.01, 0.12))
        os.kill(pids[0], signal.SIGKILL)
        forked_worlds.finish(pids)
        loaded = load(ALONE, "auto", where, passed_over.append)
        steps.append(loaded.step if loaded else 0)
        if loaded:
            content = loaded.tensors["weights.safetensors"]["w"]
            assert bool((content == loaded.step).all())
    return {"steps": steps, "passed over": passed_over}


def saving(where: Store, step: int) -> None:
    """Writes checkpoints of one megabyte without end."""
    writer = Writer(where, keep=2)
    while True:
        weights = {"w": torch.full((256, 1024), float(step))}
        at = {"step": step, "epoch": 0, "offset": 0}
        nothing: dict[str, Any] = {"identity": {}, "training": {}, "extras": {}}
        state = json.dumps({"progress": at, "ranks": 1, **nothing}).encode()
        writer.start(Snapshot(step, {"weights.safetensors": weights}, frozenset(), state, {}))
        writer.wait()
        step += 1


def full_disk() -> dict[str, Any]:
    """After step 6, no file may grow beyond 1200 bytes; the training ends nevertheless."""
    folder = made("full")

    def act(step: int) -> None:
        if step == 6:  # the outputs are files, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1200, resource.RLIM_INFINITY))

    status = forked_worlds.run(1, lambda: training(folder, every="2", at_step=act, save=False))
    other = made("full and stopped")

    def slow(step: int) -> None:
        act(step)
        time.sleep(0.15 if step >= 6 else 0)

    stopped = forked_worlds.run(
        1, lambda: training(other, every="2", at_step=slow, stop_when_full=True, save=False)
    )
    steps = [one.step for one in Store(folder / "checkpoints").scan()[0]]
    forked_worlds.run_ok(1, lambda: training(folder))
    return {
        "status": status,
        "stopped": stopped,
        "steps": steps,
        "difference": difference(folder, made("whole1")),
    }


def diverging() -> list[int]:
    """Rank 1 changes a parameter after step 5; both ranks detect it within one interval."""

    def act(step: int) -> None:
        assert step <= 8, "the ranks were not stopped"

    def body() -> None:
        training(made("diverging"), at_step=act, diverge_at=5)

    return forked_worlds.run(2, body)


# scenarios whose results others compare with or resume from
FIRST = ("at_other_worlds", "shards")


def main() -> None:
    root, chosen = Path(sys.argv[1]), sys.argv[3:]
    for scenarios in (FIRST, [name for name in chosen if name not in FIRST]):
        forked_worlds.side_by_side(
            lambda name=name: (root / f"{name}.json").write_text(json.dumps(globals()[name]()))
            for name in scenarios
        )
    found = {name: json.loads((root / f"{name}.json").read_text()) for name in chosen}
    (root / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
