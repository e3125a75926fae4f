"""One rank of ``compare.py``: the same model, data order, optimizer and log with four libraries.

Every variant trains the image recipe's network on the same random images (28×28) with the same
global batches and AdamW, and reduces the mean loss of every 50 steps over all ranks, as for a log.
Only the loop differs. The variants take turns in one process, a chunk of steps each, so that load
affects all of them equally. Prints the seconds of every chunk as JSON.
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
    """Batches of one rank from a shuffled index, as a hand-written loop has them."""
    pixels, labels = images()
    share = batch // size
    epoch = num_steps = 0
    while num_steps < steps:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, SAMPLES - batch + 1, batch):
            ids = order[start + rank * share : start + (rank + 1) * share]
            yield pixels[ids].to(DEVICE), labels[ids].to(DEVICE)
            num_steps += 1
            if num_steps == steps:
                return
        epoch += 1


class Log:
    """Sums the loss, and reduces it over all ranks every LOG_EVERY steps."""

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


def make_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], object],
    batch_rank_size: tuple[int, int, int],
) -> Loop:
    """The hand-written loop with the backward pass of a library."""
    log = Log(batch_rank_size[2])

    def loop(steps: int) -> None:
        for inputs, targets in batches(*batch_rank_size, steps):
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
    return make_loop(model, adamw(model), Tensor.backward, (batch, rank, size))


def fabric(batch: int, rank: int, size: int) -> Loop:
    """The same loop with Lightning Fabric."""
    from lightning_fabric import Fabric

    library = Fabric(accelerator=DEVICE.type, devices=size, num_nodes=1)
    library.launch()
    module = network()
    model, optimizer = library.setup(module, adamw(module))
    return make_loop(model, optimizer, library.backward, (batch, rank, size))


def accelerate(batch: int, rank: int, size: int) -> Loop:
    """The same loop with Accelerate."""
    from accelerate import Accelerator

    library = Accelerator(cpu=DEVICE.type == "cpu")
    module = network()
    model, optimizer = library.prepare(module, adamw(module))
    return make_loop(model, optimizer, library.backward, (batch, rank, size))


def paceline(batch: int, rank: int, size: int) -> Loop:
    """Paceline with its default checkpoints, heartbeats, log and replica checksums."""
    from torch.utils.data import TensorDataset

    from paceline import train

    session = train.join(
        run_dir=os.environ["BENCH_FOLDER"], log_every=LOG_EVERY, quiet=True, device=DEVICE.type
    )
    module = network()
    optimizer = adamw(module)
    model = session.prepare(module, optimizer)
    loader = session.loader(TensorDataset(*images()), batch)
    session.checkpoints(every="10m", resume="never")

    def loop(steps: int) -> None:
        progress = session.progress
        progress.step = progress.epoch = progress.offset = 0
        for _ in session.epochs(loader, steps=steps):
            for inputs, targets in loader:
                session.step(cross_entropy(model(inputs), targets, reduction="none"))

    return loop


VARIANTS = {"by hand": by_hand, "paceline": paceline, "fabric": fabric, "accelerate": accelerate}


def main() -> None:
    batch, steps, rounds = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group("gloo")
    loops = {name: make_variant(batch, rank, size) for name, make_variant in VARIANTS.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name in sorted(loops, key=lambda name: order_key(name, number)):
            seconds[name].append(measure_chunk(loops[name], steps, size))
    if rank == 0:
        # The first chunk of each variant is slower.
        print("seconds " + json.dumps({name: chunks[1:] for name, chunks in seconds.items()}))
    sys.stdout.flush()
    if size > 1:
        dist.barrier()
    time.sleep(0.2)
    os._exit(0)


def measure_chunk(loop: Loop, steps: int, size: int) -> tuple[float, float]:
    """Wall-clock seconds of a chunk, and CPU seconds of all threads of this process."""
    if size > 1:
        dist.barrier()
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    loop(steps)
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - wall_start, time.process_time() - cpu_start


def order_key(name: str, number: int) -> int:
    """Sort key that gives a different order in every round, the same on every rank."""
    return zlib.crc32(f"{name} {number}".encode())


if __name__ == "__main__":
    main()
