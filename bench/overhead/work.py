"""One rank's work for the comparison: the same model, data order, optimizer and log, four ways.

Every way trains the image recipe's network on the same random images (28×28), with the same
global batches and AdamW, and takes the mean loss of every 50 steps over all ranks, as a log
needs it. Only the loop differs. The ways take turns in one process, a chunk of steps each, so
that a busy machine hurts all of them alike. Prints the seconds of every chunk as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.recipes.networks import cnn

SAMPLES, LOG_EVERY = 8192, 50
DEVICE = torch.device(os.environ.get("BENCH_DEVICE", "cpu"))
Loop = Callable[[int], None]


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(SAMPLES, 1, 28, 28, generator=generator)
    return pixels, torch.randint(0, 10, (SAMPLES,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return cnn((1, 28, 28), 10).to(DEVICE)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def batches(batch: int, rank: int, size: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a careful person writes by hand: a shuffled index, sliced for each rank."""
    pixels, labels = images()
    share = batch // size
    epoch = done = 0
    while done < steps:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, SAMPLES - batch + 1, batch):
            ids = order[start + rank * share : start + (rank + 1) * share]
            yield pixels[ids].to(DEVICE), labels[ids].to(DEVICE)
            done += 1
            if done == steps:
                return
        epoch += 1


class Log:
    """The mean loss of every so many steps, over all ranks."""

    def __init__(self, size: int) -> None:
        self._size, self._sum, self._count = size, torch.zeros((), device=DEVICE), 0

    def add(self, loss: Tensor) -> None:
        self._sum += loss.detach()
        self._count += 1
        if self._count % LOG_EVERY == 0:
            if self._size > 1:
                dist.all_reduce(self._sum)
            self._sum.item()
            self._sum.zero_()


def looped(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], object],
    place: tuple[int, int, int],
) -> Loop:
    """The loop by hand, with the backward pass of a library; ``place`` is batch, rank, size."""
    log = Log(place[2])

    def loop(steps: int) -> None:
        for inputs, targets in batches(*place, steps):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            log.add(loss)

    return loop


def by_hand(batch: int, rank: int, size: int) -> Loop:
    """Plain torch with DistributedDataParallel."""
    model: nn.Module = network()
    if size > 1:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return looped(model, adamw(model), Tensor.backward, (batch, rank, size))


def fabric(batch: int, rank: int, size: int) -> Loop:
    """Lightning Fabric around the same loop."""
    from lightning_fabric import Fabric

    made = Fabric(accelerator=DEVICE.type, devices=size, num_nodes=1)
    made.launch()
    plain = network()
    model, optimizer = made.setup(plain, adamw(plain))
    return looped(model, optimizer, made.backward, (batch, rank, size))


def accelerate(batch: int, rank: int, size: int) -> Loop:
    """Accelerate around the same loop."""
    from accelerate import Accelerator

    made = Accelerator(cpu=DEVICE.type == "cpu")
    plain = network()
    model, optimizer = made.prepare(plain, adamw(plain))
    return looped(model, optimizer, made.backward, (batch, rank, size))


def paceline(batch: int, rank: int, size: int) -> Loop:
    """This library, with checkpoints, heartbeats, exact log and proof of equality as they are."""
    from torch.utils.data import TensorDataset

    from paceline import train

    session = train.join(
        run_dir=os.environ["BENCH_FOLDER"], log_every=LOG_EVERY, quiet=True, device=DEVICE.type
    )
    plain = network()
    optimizer = adamw(plain)
    model = session.prepare(plain, optimizer)
    loader = session.loader(TensorDataset(*images()), batch)
    session.checkpoints(every="10m", resume="never")

    def loop(steps: int) -> None:
        progress = session.progress
        progress.step = progress.epoch = progress.offset = 0
        for _ in session.epochs(loader, steps=steps):
            for inputs, targets in loader:
                session.step(cross_entropy(model(inputs), targets, reduction="none"))

    return loop


WAYS = {"by hand": by_hand, "paceline": paceline, "fabric": fabric, "accelerate": accelerate}


def main() -> None:
    batch, steps, rounds = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    loops = {name: way(batch, rank, size) for name, way in WAYS.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name in sorted(loops, key=lambda name: hash_of(name, number)):
            seconds[name].append(timed(loops[name], steps, size))
    if rank == 0:
        # The first chunk of each way is slower.
        print("seconds " + json.dumps({name: taken[1:] for name, taken in seconds.items()}))
    sys.stdout.flush()
    if size > 1:
        dist.barrier()
    time.sleep(0.2)
    os._exit(0)


def timed(loop: Loop, steps: int, size: int) -> tuple[float, float]:
    """Seconds by the wall clock, and of CPU time in all threads of this process."""
    if size > 1:
        dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    loop(steps)
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def hash_of(name: str, number: int) -> int:
    """Another order in every round, the same on every rank."""
    return zlib.crc32(f"{name} {number}".encode())


if __name__ == "__main__":
    main()
