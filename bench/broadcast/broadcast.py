"""Initial weights from one host to all, beside gloo's broadcast and the line itself.

``python bench/broadcast/broadcast.py`` prints Markdown. It needs root, ``ip`` and ``tc``, and makes
its own hosts (``bench/links.py``). The line's own time is that of a plain TCP stream of as many
bytes from the first host to the second, in the same namespaces in the same minute.
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


def stream(rank: int, count: int) -> float:
    """Seconds until so many bytes have arrived at the second host; on the other hosts too."""
    seconds = torch.zeros(1, dtype=torch.float64)
    if rank == 1:
        with socket.create_server(("10.9.0.2", 5300)) as server:
            dist.barrier()
            taken, _ = server.accept()
            room, left, began = bytearray(1 << 20), count, time.perf_counter()
            while left:
                left -= taken.recv_into(room, min(left, len(room)))
            seconds[0] = time.perf_counter() - began
            taken.close()
    else:
        dist.barrier()
        if rank == 0:
            with socket.create_connection(("10.9.0.2", 5300)) as out:
                out.sendall(bytes(count))
    dist.all_reduce(seconds)
    return float(seconds)


def timed(act: Callable[[], object]) -> float:
    """Seconds from the common start to the last host's end."""
    dist.barrier()
    began = time.perf_counter()
    act()
    mine = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def rank(number: int, ranks: int, megabytes: float, repeats: int) -> dict[str, Any]:
    """All measurements of one world."""
    comms = Comms(World(number, ranks), torch.device("cpu"))
    # Like a model: many tensors of different sizes.
    sizes = [megabytes * 250_000 * part for part in (0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05)]
    tensors = [torch.full((int(size),), float(number)) for size in sizes]
    tensors += [torch.full((100,), float(number)) for _ in range(50)]
    count = sum(4 * one.numel() for one in tensors)
    flat = torch.full((count // 4,), float(number))
    found: dict[str, Any] = {"line": [], "gloo": [], "ours": []}
    for _ in range(repeats):
        found["line"].append(stream(number, count))
        found["gloo"].append(timed(lambda: dist.broadcast(flat, 0)))
        found["ours"].append(timed(lambda: comms.broadcast(tensors)))
    assert all(bool((one == 0).all()) for one in [*tensors, flat])
    return found


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
    well = True
    for rate in options.rate or ["1gbit", "100mbit"]:
        for size in options.ranks or ([2, 4, 8] if rate == "1gbit" else [4]):
            megabytes = options.megabytes * (0.2 if rate == "100mbit" else 1)
            found = links.on_hosts(size, rate, rank, megabytes, options.repeats)[0]
            ms = {name: 1e3 * statistics.median(one) for name, one in found.items()}
            well &= ms["ours"] <= 1.2 * ms["line"]
            print(f"| {rate}, {megabytes:g} MB | {size} | {ms['line']:.0f} | {ms['gloo']:.0f} | "
                  f"{ms['gloo'] / ms['line']:.2f} | {ms['ours']:.0f} | "
                  f"**{ms['ours'] / ms['line']:.2f}** |", flush=True)  # fmt: skip
    print(f"\nLoad at the end {os.getloadavg()[0]:.1f}.")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
