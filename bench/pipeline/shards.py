"""Cost of a folder of shards: building its index, computing its order, and reading it.

Reads the raw samples of an epoch from shards that are not in the page cache (``posix_fadvise``): in
the order of ``ShardedDataset``, with and without reading ahead, and in the order of a shuffle of
all samples.

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


def drop_page_cache(folder: Path) -> None:
    """Drop the shards from the page cache."""
    for path in folder.glob("*.tar"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def epoch(data: train.ShardedDataset, order: Order, reads_ahead: bool) -> None:
    fetch = Fetch(data, torch.device("cpu"), collate=lambda samples: (len(samples),))
    if not reads_ahead:
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
        folder, rng = Path(name), np.random.default_rng(0)
        samples = ({"bin": rng.bytes(options.size), "cls": n % 10} for n in range(count))
        shard = options.samples * (-(-options.size // 512) * 512 + 3 * 512)
        train.write_shards(folder, samples, size=shard)
        os.sync()
        size = sum(path.stat().st_size for path in folder.glob("*.tar"))
        print(f"{count:,} samples of {options.size:,} bytes in {options.shards} shards\n")
        drop_page_cache(folder)
        cpu = time.process_time()
        duration_s = seconds(lambda: [tars.scan(path) for path in sorted(folder.glob("*.tar"))])
        cpu = time.process_time() - cpu
        print(
            f"* headers of an index: {cpu / count * 1e6:.0f} µs of CPU time per sample,"
            f" {duration_s / count * 1e6:.0f} µs by the wall clock, one thread, cold disk"
        )
        train.ShardedDataset(folder)
        duration_s = seconds(lambda: train.ShardedDataset(folder))
        print(f"* reading an existing index: {duration_s * 1000:.1f} ms")
        large_order = ShardOrder(
            1_280_000, 0, shard_sizes=np.full(1280, 1000), num_concurrent=8, window=4096
        )
        duration_s = seconds(lambda: large_order.at(0, np.arange(64)))
        print(
            f"* order of 1,280 shards with 1,280,000 samples, first batch:"
            f" {duration_s * 1000:.1f} ms\n"
        )
        orders: dict[str, tuple[bool, bool]] = {
            "shards, read ahead": (True, True),
            "shards": (True, False),
            "all samples shuffled": (False, False),
        }
        rates_by_title: dict[str, list[float]] = {title: [] for title in orders}
        for _ in range(options.rounds):
            for title, (by_shard, reads_ahead) in orders.items():
                data = train.ShardedDataset(folder, decode=lambda sample: len(sample))
                order = data.visiting_order(0, True) if by_shard else Order(len(data), 0)
                drop_page_cache(folder)
                epoch_s = seconds(lambda d=data, o=order, a=reads_ahead: epoch(d, o, a))
                rates_by_title[title].append(size / 1e6 / epoch_s)
        print("| order | MB/s, median (min to max) |\n|---|---|")
        for title, rates in rates_by_title.items():
            median_rate = statistics.median(rates)
            print(f"| {title} | {median_rate:.0f} ({min(rates):.0f} to {max(rates):.0f}) |")


if __name__ == "__main__":
    main()
