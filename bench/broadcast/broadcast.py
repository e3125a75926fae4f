"""Broadcast of initial weights: Paceline against gloo's broadcast and a plain TCP stream.

``python bench/broadcast/broadcast.py`` prints Markdown. It needs root, ``ip`` and ``tc``, and
creates its own hosts (``bench/links.py``). The column "line" is the time of a plain TCP stream of
the same number of bytes from the first host to the second, measured in the same namespaces.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src")]

import links
import torch
import torch.distributed as dist

from paceline.train.comms import Comms
from paceline.train.world import World


def tcp_stream_s(rank: int, count: int) -> float:
    """Seconds until ``count`` bytes have reached the second host, on all ranks."""
    seconds = torch.zeros(1, dtype=torch.float64)
    if rank == 1:
        with socket.create_server(("10.9.0.2", 5300)) as server:
            dist.barrier()
            connection, _ = server.accept()
            buffer, remaining, start = bytearray(1 << 20), count, time.perf_counter()
            while remaining:
                remaining -= connection.recv_into(buffer, min(remaining, len(buffer)))
            seconds[0] = time.perf_counter() - start
            connection.close()
    else:
        dist.barrier()
        if rank == 0:
            with socket.create_connection(("10.9.0.2", 5300)) as out:
                out.sendall(bytes(count))
    dist.all_reduce(seconds)
    return float(seconds)


def slowest_rank_s(operation: Callable[[], object]) -> float:
    """Seconds from the common start until the slowest rank has finished."""
    dist.barrier()
    start = time.perf_counter()
    operation()
    elapsed = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def rank(number: int, ranks: int, megabytes: float, repeats: int) -> dict[str, Any]:
    """All measurements of one rank, in seconds."""
    comms = Comms(World(number, ranks), torch.device("cpu"))
    # Like a model: many tensors of different sizes.
    sizes = [megabytes * 250_000 * part for part in (0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05)]
    tensors = [torch.full((int(size),), float(number)) for size in sizes]
    tensors += [torch.full((100,), float(number)) for _ in range(50)]
    count = sum(4 * tensor.numel() for tensor in tensors)
    flat = torch.full((count // 4,), float(number))
    seconds: dict[str, Any] = {"line": [], "gloo": [], "ours": []}
    for _ in range(repeats):
        seconds["line"].append(tcp_stream_s(number, count))
        seconds["gloo"].append(slowest_rank_s(lambda: dist.broadcast(flat, 0)))
        seconds["ours"].append(slowest_rank_s(lambda: comms.broadcast(tensors)))
    assert all(bool((tensor == 0).all()) for tensor in [*tensors, flat])
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    columns = ["rate", "hosts", "line", "gloo", "T/line", "ours", "T/line"]
    print(f"# {options.megabytes:g} MB from one host to all\n\n{links.machine()}\n\n"
          f"Medians of {options.repeats}, in ms, until the last host has all.\n\n"
          f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)  # fmt: skip
    passed = True
    for rate in options.rate or ["1gbit", "100mbit"]:
        for size in options.ranks or ([2, 4, 8] if rate == "1gbit" else [4]):
            megabytes = options.megabytes * (0.2 if rate == "100mbit" else 1)
            seconds_by_method = links.on_hosts(size, rate, rank, megabytes, options.repeats)[0]
            ms = {
                name: 1e3 * statistics.median(samples)
                for name, samples in seconds_by_method.items()
            }
            passed &= ms["ours"] <= 1.2 * ms["line"]
            print(f"| {rate}, {megabytes:g} MB | {size} | {ms['line']:.0f} | {ms['gloo']:.0f} | "
                  f"{ms['gloo'] / ms['line']:.2f} | {ms['ours']:.0f} | "
                  f"**{ms['ours'] / ms['line']:.2f}** |", flush=True)  # fmt: skip
    print(f"\nLoad at the end {os.getloadavg()[0]:.1f}.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
