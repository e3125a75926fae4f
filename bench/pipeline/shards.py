"""What a folder of shards costs: its index, its order, and reading it in that order.

Read are the raw samples of an epoch, from shards that the system has forgotten before
(``posix_fadvise``): in the order of ``ShardedDataset``, with and without reading ahead, and as a
shuffle of all samples would visit them.

    python bench/pipeline/shards.py [--shards 64] [--samples 500] [--size 20000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from paceline import train
from paceline.train.data import tars
from paceline.train.data.fetch import BatchRequest, Fetch
from paceline.train.data.order import Order, ShardOrder

BATCH = 64


def forget(folder: Path) -> None:
    """What is in the page cache goes."""
    for path in folder.glob("*.tar"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(act: Callable[[], object]) -> float:
    before = time.perf_counter()
    act()
    return time.perf_counter() - before


def epoch(data: train.ShardedDataset, order: Order, ahead: bool) -> None:
    fetch = Fetch(data, torch.device("cpu"), collate=lambda samples: (len(samples),))
    if not ahead:
        data.will_need = lambda ids: None  # type: ignore[method-assign]
    positions = np.array_split(np.arange(len(data)), -(-len(data) // BATCH))
    for _ in fetch(BatchRequest(order.at(0, part), None, 0) for part in positions):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--size", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    count = options.shards * options.samples
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", dir="/var/tmp") as name:
        folder, draw = Path(name), np.random.default_rng(0)
        samples = ({"bin": draw.bytes(options.size), "cls": n % 10} for n in range(count))
        shard = options.samples * (-(-options.size // 512) * 512 + 3 * 512)
        train.write_shards(folder, samples, size=shard)
        os.sync()
        size = sum(path.stat().st_size for path in folder.glob("*.tar"))
        print(f"{count:,} samples of {options.size:,} bytes in {options.shards} shards\n")
        forget(folder)
        cpu = time.process_time()
        took = seconds(lambda: [tars.scan(path) for path in sorted(folder.glob("*.tar"))])
        cpu = time.process_time() - cpu
        print(
            f"* headers of an index: {cpu / count * 1e6:.0f} µs of CPU time a sample,"
            f" {took / count * 1e6:.0f} µs by the wall clock, one thread, cold disk"
        )
        train.ShardedDataset(folder)
        took = seconds(lambda: train.ShardedDataset(folder))
        print(f"* the index that is there, read again: {took * 1000:.1f} ms")
        large = ShardOrder(
            1_280_000, 0, shard_sizes=np.full(1280, 1000), num_concurrent=8, window=4096
        )
        took = seconds(lambda: large.at(0, np.arange(64)))
        print(
            f"* order of 1,280 shards with 1,280,000 samples, first batch: {took * 1000:.1f} ms\n"
        )
        ways: dict[str, tuple[bool, bool]] = {
            "shards, read ahead": (True, True),
            "shards": (True, False),
            "all samples shuffled": (False, False),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, (by_shard, ahead) in ways.items():
                data = train.ShardedDataset(folder, decode=lambda sample: len(sample))
                order = data.visiting_order(0, True) if by_shard else Order(len(data), 0)
                forget(folder)
                taken = seconds(lambda d=data, o=order, a=ahead: epoch(d, o, a))
                found[way].append(size / 1e6 / taken)
        print("| order | MB/s, median (least to most) |\n|---|---|")
        for way, rates in found.items():
            middle = statistics.median(rates)
            print(f"| {way} | {middle:.0f} ({min(rates):.0f} to {max(rates):.0f}) |")


if __name__ == "__main__":
    main()
