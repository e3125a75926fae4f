"""Runs trainings with residuals while ranks are lost and join.

With plain SGD, the parameters show which gradients a training has applied. So each process leaves
what it computed, and its residual when it ended or died.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from small_launcher import Job
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from paceline import train
from paceline.train.reduce import auto, choice, selection
from paceline.train.reduce.coded_reducer import CodedReducer
from paceline.train.reduce.collectives import Collectives
from paceline.train.reduce.reducer import Bucket

RATE, STEPS, SAMPLES, BATCH, DIES_AT = 0.05, 36, 144, 24, 6
SLOW = 0.03  # seconds per step, so that ranks poll for messages every few steps
WAITS_AT = 9  # step at which the others wait for a newcomer


class Account:
    """Records what a process has computed of the applied gradients, and what it has not sent."""

    def __init__(self, session: train.Session, network: nn.Module) -> None:
        self._session, self.parameters = session, [*network.parameters()]
        self._path = session.folder / f"{os.environ['PACELINE_HOST']}.{os.getpid()}"
        self._computed = [torch.zeros_like(one, requires_grad=False) for one in self.parameters]
        self._gradients: dict[int, Tensor] = {}
        for number, one in enumerate(self.parameters):
            one.register_hook(lambda gradient, number=number: self._take(number, gradient))

    def _take(self, number: int, gradient: Tensor) -> None:
        self._gradients[number] = gradient.detach().clone()

    def stepped(self, counts: bool, ranks: int) -> None:
        if counts:
            for number, gradient in self._gradients.items():
                self._computed[number] += gradient / ranks
        self._gradients.clear()

    @property
    def _method(self) -> Any:
        exchange = self._session.models.first.exchange
        return None if exchange is None else exchange.reducer

    def leave(self, ranks: int, *, ended: bool = True) -> None:
        method, updater = self._method, self._session.models.first
        owed = [torch.zeros_like(one, requires_grad=False) for one in self.parameters]
        if isinstance(method, CodedReducer):
            names = [name for name, _ in updater.module.named_parameters()]
            for name, one in zip(names, owed, strict=True):
                if name in method._feedback._views:
                    one += method._feedback._views[name].committed.detach() / ranks
        found = {"ended": ended}
        found |= {"computed": flat(self._computed), "owed": flat(owed)}
        torch.save(found, f"{self._path}.pt")


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def owing(folder: Path, asked: str, dies: int, again: int, behind: int | None) -> None:
    """Runs a training that loses the rank of a slot.

    Args:
        again: Number of newcomers in its place.
        behind: A rank on which the end of an exchange appears to fail; the lost rank dies after it.
            Without it, the lost rank dies while some of its gradients are being sent.
    """
    slot, newcomer = int(os.environ["RANK"]), "PACELINE_NEWCOMER" in os.environ
    torch.set_num_threads(1)
    choice._MIN_BUCKET_BYTES = 1 << 14  # makes several buckets
    seconds = dict.fromkeys(selection.CANDIDATES, 1.0)
    auto.choose = lambda *_, **__: selection.Choice("int4", 3, seconds)
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 16, generator=source, dtype=torch.float64)
    data = TensorDataset(inputs, (inputs[:, :4] + inputs[:, 4:8]).argmax(1))
    with train.join(run_dir=folder, dtype="float64", seed=4, check_every=3, quiet=True) as session:
        torch.manual_seed(1)
        network = session.place(
            nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(),
                          nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 4))
        )  # fmt: skip
        begin = flat([*network.parameters()])
        made = torch.optim.SGD(network.parameters(), RATE)
        model = session.prepare(network, made, communication=asked)
        loader = session.loader(data, BATCH)
        session.checkpoints(every="5")
        account, averaged = Account(session, network), note_averages()

        def die() -> None:
            account.leave(session.world.size, ended=False)
            os.kill(os.getpid(), signal.SIGKILL)

        def die_amid(_: Tensor) -> None:
            """Dies when the others have averaged the first bucket, whose result is discarded."""
            exchange = session.models.first.exchange
            if session.progress.step == DIES_AT and exchange is not None:
                while not averaged:
                    time.sleep(0.001)
                die()

        updates = session.models.first.update

        def die_after(*, measured: bool = False) -> dict[str, float]:
            found = updates(measured=measured)
            if session.progress.step == DIES_AT:
                account.stepped(True, session.world.size)
                die()
            return found

        if slot == dies and not newcomer:
            if behind is None:
                account.parameters[0].register_hook(die_amid)
            else:
                session.models.first.update = die_after
        if slot == behind:
            _cut_short(session)
        for _ in session.epochs(loader, steps=STEPS):
            for batch in loader:
                time.sleep(SLOW)
                while again and session.progress.step == WAITS_AT and not ready(folder).exists():
                    time.sleep(0.01)
                averaged.clear()
                ranks = session.world.size
                losses = cross_entropy(model(batch.data[0]), batch.data[1], reduction="none")
                account.stepped(session.step(losses), ranks)
        session.verify()
        account.leave(session.world.size)
        if session.world.rank == 0:
            torch.save((begin - flat([*network.parameters()])) / RATE, folder / "got.pt")


def note_averages() -> list[int]:
    """Returns a list to which the numbers of averaged buckets are added."""
    average = CodedReducer.all_reduce
    averaged: list[int] = []

    def averages(self: CodedReducer, bucket: Bucket) -> None:
        average(self, bucket)
        averaged.append(bucket.number)

    CodedReducer.all_reduce = averages  # type: ignore[method-assign]
    return averaged


def _cut_short(session: train.Session) -> None:
    """Makes the last message of an exchange fail on this rank after all others received it."""
    average, share, last = CodedReducer.all_reduce, Collectives.all_gather, False

    def averages(self: CodedReducer, bucket: Bucket) -> None:
        nonlocal last
        last = bucket.is_last and session.progress.step == DIES_AT
        average(self, bucket)

    def shares(self: Collectives, message: Tensor, codes: int = 0) -> Tensor:
        rows = share(self, message, codes)
        if last:
            raise RuntimeError("Connection closed by peer")
        return rows

    CodedReducer.all_reduce, Collectives.all_gather = averages, shares  # type: ignore[method-assign]


def ready(folder: Path) -> Path:
    return folder / "ready"


WORLDS: dict[str, dict[str, Any]] = {
    "int4": {"size": 3, "asked": "int4", "dies": 1},
    "int4 behind": {"size": 3, "asked": "int4", "dies": 1, "again": 0, "behind": 2},
    "auto": {"size": 2, "asked": "auto", "dies": 1},  # one is alone until another joins
}


def worlds(root: Path) -> dict[str, Any]:
    """Runs all worlds; returns their results."""
    return {name: world(root / f"owing {name}", **how) for name, how in WORLDS.items()}


def world(
    folder: Path, size: int, asked: str, dies: int, again: int = 1, behind: int | None = None
) -> dict[str, Any]:
    def saw(job: Job, slot: int, message: dict[str, Any]) -> None:
        if message.get("event") == "newcomer ready":
            ready(folder).touch()

    def body() -> None:
        owing(folder, asked, dies, again, behind)

    job = Job(body, size, folder, again=again, saw=saw).run()
    left = {path.stem: torch.load(path) for path in folder.glob("n*.pt")}
    (lost,) = (one["owed"] for one in left.values() if not one["ended"])
    computed = sum(one["computed"] for one in left.values())
    owed = sum(one["owed"] for one in left.values() if one["ended"])
    got = torch.load(folder / "got.pt")
    return {
        "statuses": job.statuses,
        "joined": [slot for _, slot, _ in job.events("newcomer ready")],
        "off": float((got - (computed - owed - lost)).norm()),
        "lost": float(lost.norm()),
        "owed": float(owed.norm()),
    }
