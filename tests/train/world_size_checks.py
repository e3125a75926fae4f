"""Checks, on every rank of forked worlds, what only several processes can show."""

from __future__ import annotations

import json
import sys
import time
import weakref
from pathlib import Path

import forked_worlds
import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Subset, TensorDataset, random_split
from unused_parameters import Branches

from paceline import train
from paceline.spec.errors import DataError, JobError
from paceline.train import parallel
from paceline.train.reduce import small_messages
from paceline.train.reduce.exchange import GradientExchange
from paceline.train.update import Updater


def world(folder: Path) -> None:
    """Runs one rank of a world."""
    torch.set_num_threads(1)
    with train.join(run_dir=folder / "run", dtype="float64", seed=5, check_every=1) as session:
        found = {
            "sums": sums(session),
            "agree": refused(lambda: session.agree("it", str(session.world.rank // 2))),
            "together": refused(lambda: session.together(lambda: fail_on_last(session))),
            "few": refused(lambda: session.loader(numbers(1), 4)) if session.world.size > 1 else "",
            "order": stated_order(session),
            "orders": refused(lambda: session.loader(numbers(9), 4, order=own_order(session))),
            "split": refused(lambda: session.loader(own_split(session), 4)),
            "evaluation split": refused(lambda: list(session.shard(own_split(session)))),
            "once": made_once(session, folder),
            "odd": odd_sizes(session),
            "trained": trained(session, limit=0),
            "accumulated": trained(session, limit=2),
            "sharded": trained(session, limit=0, shard=True),
            "sharded and accumulated": trained(session, limit=1, shard=True, clip_norm=0.5),
            "partly used": partly_used(session),
            "with buffers": with_buffers(session),
            "counted": counted(session),
            "in step": in_step(session) if session.world.size > 1 else {},
            "held up": held_up(session) if session.world.size > 1 else [],
            "held up before": held_up(session, buffers=True) if session.world.size > 1 else [],
            "exchanged": exchanged(session, 0) if session.world.size > 1 else {},
            "exchanged directly": exchanged(session, 1 << 18) if session.world.size > 1 else {},
            "places": gradient_places(session) if session.world.size > 1 else {},
            "clipped": trained(session, limit=0, clip_norm=0.5),
            "diverged": refused(lambda: diverge(session)) if session.world.size > 1 else "",
        }
    (folder / f"{session.world.rank}.json").write_text(json.dumps(found))


def refused(act) -> str:
    try:
        act()
    except (JobError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


OF_DDP = {"as made": "by ddp", "unused, as made": "unused"}


class Backwards(nn.Sequential):
    """Runs its layers in reverse, so that gradients come in the order of the parameters."""

    def forward(self, inputs):
        for layer in reversed(self):
            inputs = layer(inputs)
        return inputs


class Counting(GradientExchange):
    """Counts the buckets that a backward pass gives to a reducer."""

    count = 0

    def reduce_bucket(self, given):
        if self._reducer or self._direct:
            self.count = given.index() + 1
        return super().reduce_bucket(given)


def exchanged(session: train.Session, most: int) -> dict[str, list[float]]:
    """Returns the weights after some steps, by the way in which gradients are averaged.

    Args:
        most: Bytes up to which three ranks average a model's gradients directly.
    """
    found, places, usual = {}, {}, small_messages.MAX_BYTES
    small_messages.MAX_BYTES = most
    of_two = GradientExchange._is_pair
    ways = ("by ddp", "hook", "as made", "laid out", "laid out, hook")
    for way in (*ways, "unused", "unused, hook", "unused, as made"):
        torch.manual_seed(7)
        layers = [layer for _ in range(4) for layer in (nn.Linear(9, 9), nn.Tanh())]
        network = Backwards(*layers).to(torch.float32)
        replica = parallel.replicate(network, session.device, session.comms, unused="unused" in way)
        if way in OF_DDP.values():  # otherwise two ranks use a direct exchange
            GradientExchange._is_pair = property(lambda self: False)  # type: ignore[assignment]
        exchange = Counting(replica, session.comms)
        directly = exchange._direct is not None
        assert directly == (session.world.size == 2 or bool(most)) or way in OF_DDP.values()
        if "hook" in way:
            exchange.reducer = exchange._make_exact()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        updater = Updater(network, optimizer, LambdaLR(optimizer, lambda n: 0.9**n), None, None)
        updater.exchange = exchange
        for step in range(8):
            if "laid out" in way and step in (1, 3):
                exchange.set_bucket_sizes(600, 200)
            if "as made" in way and step == 1:
                exchange.reducer = exchange._make_exact()
            if "as made" in way and step == 3:
                exchange.reset()
                exchange.count = 0
            torch.manual_seed(10 * step + session.world.rank)
            updater.backward(replica(torch.randn(5, 9)).square().mean())
            if step in (3, 7):
                lying = [one.grad.storage_offset() for one in network.parameters()]
                assert "as made" not in way or lying == places[OF_DDP[way]]
                places[way] = lying
            updater.update(measured=step == 6)
        exchange.close()
        buckets = {"hook": 1, "unused, hook": 1, "laid out, hook": 3}
        by_itself = (3 if "laid out" in way else 1) if directly else 0
        assert exchange.count == buckets.get(way, by_itself)
        former = weakref.ref(replica.reducer)
        exchange.set_bucket_sizes(600, 200)
        assert former() is None  # its buckets are freed, too
        found[way] = torch.cat([one.detach().flatten() for one in network.parameters()]).tolist()
        GradientExchange._is_pair = of_two  # type: ignore[method-assign]
    small_messages.MAX_BYTES = usual
    return found


def gradient_places(session: train.Session) -> dict[str, list[list[int]]]:
    """Returns where gradients lie in their buckets, after each step, by method.

    Two layers are trained from the fourth step on, so that the buckets change there.
    """
    places = {}
    for method in ("exact", "fp16", "bf16", "int8", "int4"):
        torch.manual_seed(7)
        network = Backwards(*(nn.Linear(9, 9) for _ in range(6))).to(torch.float32)
        network[:2].requires_grad_(False)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        model = session.prepare(network, optimizer, communication=method)
        updater, places[method] = session.models.first, []
        for step in range(6):
            if step == 3:
                network.requires_grad_(True)
                assert session.models.include_thawed()
            updater.backward(model(torch.randn(5, 9)).square().mean())
            gradients = [p.grad for p in network.parameters() if p.grad is not None]
            places[method].append([gradient.storage_offset() for gradient in gradients])
            updater.update()
    return places


def partly_used(session: train.Session) -> list[float]:
    session.progress.step = session.progress.epoch = session.progress.offset = 0
    torch.manual_seed(2)
    network = session.place(Branches())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = session.prepare(network, optimizer, unused=True)
    loader = session.loader(numbers(11), 4)
    for _ in session.epochs(loader, 2):
        for inputs, targets in loader:
            step = session.progress.step
            session.step(mse_loss(model(inputs, step), targets, reduction="none")[:, 0])
    return torch.cat([one.detach().flatten() for one in network.parameters()]).tolist()


def counted(session: train.Session) -> list[float]:
    """Counts three samples by the length of each batch."""
    meter = session.meter()
    for (values,) in session.shard(TensorDataset(torch.ones(3)), size=1):
        meter.add(len(values), hits=values)
    means = meter.result()
    return [means.count, means["hits"]]


def in_step(session: train.Session) -> dict[str, object]:
    """Returns whether differing buffers, and replicas of sharded parameters, are detected."""
    session.progress.step = session.progress.epoch = session.progress.offset = 0
    network = session.place(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    network.register_buffer("table", torch.ones(2))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    loader = session.loader(numbers(24), 12)
    for _ in session.epochs(loader, 1):
        for inputs, targets in loader:
            session.step(mse_loss(model(inputs), targets, reduction="none")[:, 0])
        statistics = network[1].running_mean.tolist()  # used by an evaluation
    changed = session.world.rank == 1
    network.table += changed
    buffer = refused(session.verify)
    network.table.fill_(1)

    torch.manual_seed(3)  # the ranks' generators differ by now
    mesh = init_device_mesh("cpu", (session.world.size, 1), mesh_dim_names=("copies", "shards"))
    sharded = torch.distributed.fsdp.fully_shard(nn.Linear(3, 1).double(), mesh=mesh)
    sharded.register_buffer("table", torch.ones(2))
    model = session.prepare(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    sharded.table += changed
    beside = refused(session.verify)
    sharded.table.fill_(1)
    model(torch.ones(1, 3, dtype=torch.float64))  # leaves unsharded parameters in memory
    session.verify()
    with torch.no_grad():
        sharded.weight.to_local().add_(1e-12 * changed)
    return {
        "statistics": statistics,
        "buffer": buffer,
        "beside": beside,
        "replica": refused(session.verify),
    }


def held_up(session: train.Session, buffers: bool = False) -> list[str]:
    """Returns the messages at the end of a training in which rank 1 is slow.

    With buffers, the others wait for it before their forward pass.
    """
    session.progress.step = session.progress.epoch = session.progress.offset = 0
    said: list[str] = []
    session.say = said.append  # type: ignore[method-assign]
    network = session.place(nn.Linear(3, 1))
    if buffers:
        network.register_buffer("table", torch.ones(2))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    loader = session.loader(numbers(24), 4)
    for _ in session.epochs(loader, 3):
        for inputs, targets in loader:
            time.sleep(0.1 * (session.world.rank == 1))
            session.step(mse_loss(model(inputs), targets, reduction="none")[:, 0])
    del session.say
    return said[-1].splitlines()


def with_buffers(session: train.Session) -> list[int]:
    """Takes one step of a network with buffers, which are synchronized over all ranks."""
    session.progress.step = session.progress.epoch = session.progress.offset = 0
    network = session.place(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    loader = session.loader(numbers(12), 12)
    for _ in session.epochs(loader, 1):
        for inputs, targets in loader:
            session.step(mse_loss(model(inputs), targets, reduction="none")[:, 0])
    return [int(network[1].num_batches_tracked)]


def stated_order(session: train.Session) -> list[list[int]]:
    """Returns the samples that this rank visits in a given order, and in one by length."""
    lengths = [5, 1, 4, 1, 5, 9, 2, 6, 5]
    visited = []
    for options in ({"order": lambda epoch: [8 - epoch] * 9}, {"lengths": lengths}):
        session.progress.step = session.progress.epoch = session.progress.offset = 0
        loader = session.loader(numbers(9), 4, **options)
        network = session.place(nn.Linear(3, 1))
        model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
        ids: list[int] = []
        for _ in session.epochs(loader, 2):
            for batch in loader:
                ids += batch.ids[: batch.count].tolist()
                session.step(mse_loss(model(batch.data[0]), batch.data[1], reduction="none")[:, 0])
        visited.append(ids)
    return visited


def own_order(session: train.Session):
    return lambda epoch: [session.world.rank] * 9


def own_split(session: train.Session) -> Subset:
    """A split by random numbers of the rank, as after ``session.prepare``."""
    generator = torch.Generator().manual_seed(session.world.rank)
    return random_split(numbers(12), [9, 3], generator)[0]


def fail_on_last(session: train.Session) -> None:
    if session.world.rank == session.world.size - 1:
        raise DataError("this rank cannot read it", found="0 bytes", remedy="copy it")


def sums(session: train.Session) -> list[float]:
    """Gathers and sums tensors of several shapes over the ranks."""
    for shape in ((), (2, 3), (40, 50), (0, 3)):
        mine = torch.full(shape, 1.0 + session.world.rank, dtype=torch.float64)
        rows = session.comms.rows(mine)
        assert rows.shape == (session.world.size, *shape)
        assert torch.equal(session.comms.sum(mine.clone()), rows.sum(0))
    return session.comms.rows(torch.tensor([session.world.rank])).flatten().tolist()


def made_once(session: train.Session, folder: Path) -> int:
    """Returns how often ``once`` made a file on the disk that all ranks share."""
    with_makers = folder / "makers"
    with_makers.mkdir(exist_ok=True)
    for _ in range(2):
        session.once(folder / "made", lambda to: make(to, with_makers / str(session.world.rank)))
    assert (folder / "made/file").read_text() == "whole"
    return len(list(with_makers.iterdir()))


def make(to: Path, maker: Path) -> None:
    maker.touch()
    (to / "file").write_text("whole")


def numbers(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)


def odd_sizes(session: train.Session) -> list[tuple[int, float]]:
    """Returns means over data sets that the number of ranks does not divide, some smaller."""
    means = []
    for count in (1, 2, 3, 7, 11):
        meter = session.meter()
        for batch in session.shard(numbers(count), size=2):
            meter.add(batch.count, value=batch.data[0].sum(1))
        result = meter.result()
        means.append((result.count, result["value"]))
    return means


def trained(
    session: train.Session, limit: int, shard: bool = False, clip_norm: float | None = None
) -> list[float]:
    """Trains two epochs over 11 samples in batches of 4; the last batch has 3."""
    session.progress.step = session.progress.epoch = session.progress.offset = 0
    torch.manual_seed(3)
    network = session.place(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), shard=shard)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = session.prepare(network, optimizer, clip_norm=clip_norm)
    loader = session.loader(numbers(11), 4, limit=limit)
    for _ in session.epochs(loader, 2):
        for inputs, targets in loader:
            losses = mse_loss(model(inputs), targets, reduction="none").mean(1)
            session.step(losses)
    state = parallel.full_state(network)
    return torch.cat([one.flatten() for one in state.values()]).tolist() if state else []


def diverge(session: train.Session) -> None:
    network = session.place(nn.Linear(3, 1))
    session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    if session.world.rank == 1:
        with torch.no_grad():
            network.bias += 1e-12
    session.verify()


def main() -> None:
    """Runs worlds of 1, 2 and 3 ranks."""
    for size in (1, 2, 3):
        folder = Path(sys.argv[1]) / str(size)
        folder.mkdir()
        forked_worlds.run_ok(size, lambda folder=folder: world(folder))


if __name__ == "__main__":
    main()
