"""Cost of recording the timings of each step: the same training with and without them.

    python bench/overhead/pace.py [--ranks 2] [--rounds 40]

Chunks of steps with and without timings alternate in the same processes, so that load affects both
equally. For several step lengths, prints the medians, and the median and quartiles of the ratio of
neighbouring chunks.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import sys
import tempfile
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

CHUNK = 40  # steps
ROWS = (8, 64, 256)  # batch sizes per rank, for steps of different length


def rank(number: int, size: int, port: int, folder: str, rounds: int) -> None:
    """Measure on one rank; rank 0 prints a row for each step length."""
    os.environ.update(
        RANK=str(number), WORLD_SIZE=str(size), LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) >= 2 * size:
        os.sched_setaffinity(0, cpus[2 * number : 2 * number + 2])
    torch.set_num_threads(1)
    from paceline import train

    session = train.join(run_dir=folder, quiet=True, device="cpu", log_every=10**6)
    session.say = session._journal.print = lambda text: None  # type: ignore[method-assign]
    for rows in ROWS:
        seconds = measure(session, rows, rounds)
        if number == 0:
            ratios = [
                with_timing / without_timing
                for with_timing, without_timing in zip(seconds[True], seconds[False], strict=True)
            ]
            lower, median_ratio, upper = statistics.quantiles(ratios)
            timed_ms, untimed_ms = (
                statistics.median(seconds[key]) / CHUNK * 1e3 for key in (True, False)
            )
            print(
                f"| {untimed_ms:.2f} | {timed_ms:.2f} | {median_ratio:.4f} |"
                f" {lower:.4f} to {upper:.4f} |",
                flush=True,
            )
    session.close()


def measure(session: object, rows: int, rounds: int) -> dict[bool, list[float]]:
    """Seconds of each chunk, with timings (True) and without."""
    assert hasattr(session, "prepare")
    network = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=1e-4))
    total = rows * session.world.size
    data = TensorDataset(torch.zeros(total * CHUNK, 512))
    loader, clock = session.loader(data, total, workers=0), session._loop.pace._clock
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds + 2):
        is_timed = (number % 2 == 0) ^ (number % 4 >= 2)
        session._loop.pace._clock = clock if is_timed else None
        progress = session.progress
        progress.step = progress.epoch = progress.offset = 0
        session.comms.barrier()
        start = time.perf_counter()
        for _ in session.epochs(loader, steps=CHUNK):
            for (inputs,) in loader:
                session.step(model(inputs).square().mean(dim=1))
        if number > 1:
            seconds[is_timed].append(time.perf_counter() - start)
    session._loop.pace._clock = clock
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, torch {torch.__version__},"
          f" {options.ranks} ranks\n\n| ms/step without | with | ratio | quartiles |\n"
          "|---|---|---|---|", flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for number in range(options.ranks):
            if not (pid := os.fork()):
                rank(number, options.ranks, port, folder, options.rounds)
                os._exit(0)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(int(any(statuses)))


if __name__ == "__main__":
    main()
