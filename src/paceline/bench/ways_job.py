"""What the ranks of ``paceline bench collectives`` find out of hosts and of the ways between them.

The rates are those of the backend, with its own buffers, protocol and cards: what a ping or a TCP
transfer says of a network is beside the point where the backend goes another way.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.ways import Place, Ways, partner, settled_rates, turns
from paceline.spec import jobenv

COPIED = 32 << 20  # bytes of a copy
REPEATS = 4
FIRST = 1 << 20  # bytes of the first message between two hosts, by which the second is chosen
LARGEST = 64 << 20
WANTED_S = 0.2  # of the second
MOST_TURNS = 15
TEXT = 512  # bytes of what a rank tells of itself


def measure(device: torch.device) -> Ways:
    """What all ranks find, known to all."""
    told = gather(_self(device), device)
    by_node: dict[int, list[int]] = {}
    for rank, one in enumerate(told):
        by_node.setdefault(one["node"], []).append(rank)
    nodes = [by_node[node] for node in sorted(by_node)]
    names = [told[ranks[0]]["host"] for ranks in nodes]
    places = tuple(_place([told[rank] for rank in ranks]) for ranks in nodes)
    rates = settled_rates(lambda pairs: _rates(nodes, device, pairs))
    return Ways(places, {(names[one], names[other]): rate for (one, other), rate in rates.items()})


def gather(mine: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """What every rank tells, as JSON in a small tensor: no pickle, and every backend can."""
    data = json.dumps(mine).encode()[:TEXT].ljust(TEXT)
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return [json.loads(bytes(one.cpu().numpy()).decode()) for one in every]


def _self(device: torch.device) -> dict[str, Any]:
    dist.barrier()  # all copy at once, as they do in a collective
    return {
        "node": int(os.environ.get(jobenv.GROUP_RANK, "0")),
        "host": os.environ.get(jobenv.HOST, "")[:200],
        "device": device_name(device)[:80],
        "copy": _copy_rate(torch.empty(COPIED, dtype=torch.uint8, device=device)),
        "bus": 0.0 if device.type == "cpu" else _copy_rate(_pinned(), device),
        "slot": _slot(device),
    }


def device_name(device: torch.device) -> str:
    """The card's name, or ``CPU``."""
    if device.type == "cpu":
        return "CPU"
    return str(getattr(torch, device.type).get_device_name(device))


def _pinned() -> torch.Tensor:
    return torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)


def _copy_rate(source: torch.Tensor, to: torch.device | None = None) -> float:
    """Bytes a second of the best of some copies."""
    target = torch.zeros_like(source, device=to or source.device)
    best = 0.0
    for _ in range(REPEATS):
        _synchronise(target.device)
        began = time.perf_counter()
        target.copy_(source)
        _synchronise(target.device)
        best = max(best, COPIED / max(time.perf_counter() - began, 1e-9))
    return best


def _slot(device: torch.device) -> str:
    """The PCIe link of an NVIDIA card: speed of a lane and their number."""
    if device.type != "cuda":
        return ""
    about = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, card = (int(getattr(about, name, -1)) for name in names)
    folder = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{card:02x}.0")
    try:
        speed = (folder / "current_link_speed").read_text().strip()
        return f"{speed} x{(folder / 'current_link_width').read_text().strip()}"
    except OSError:
        return ""


def _place(told: list[dict[str, Any]]) -> Place:
    """A host by its ranks: it is as fast as the slowest."""
    first = told[0]
    copy, bus = (min(float(one[what]) for one in told) for what in ("copy", "bus"))
    return Place(first["host"], first["device"], copy, bus, first["slot"])


def _rates(nodes: list[list[int]], device: torch.device,
           pairs: Collection[tuple[int, int]] | None) -> dict[tuple[int, int], float]:  # fmt: skip
    """Bytes a second from node to node, known to all ranks; all of them call this.

    Args:
        nodes: Ranks of each node.
        device: Where the buffers lie.
        pairs: Which ways, each with its way back; ``None`` for all, and those between the first two
            ranks of a node.
    """
    table = torch.zeros(len(nodes), len(nodes), dtype=torch.float64, device=device)
    me = dist.get_rank()
    for at, ranks in enumerate(nodes if pairs is None else ()):
        if len(ranks) > 1 and me in ranks[:2]:
            _both_ways(table, (at, ranks[0]), (at, ranks[1]), device)
    mine = next((at for at, ranks in enumerate(nodes) if ranks[0] == me), None)
    for turn in range(min(turns(len(nodes)), MOST_TURNS)):
        dist.barrier()
        other = None if mine is None else partner(mine, turn, len(nodes))
        if mine is None or other is None:
            continue
        one, two = sorted((mine, other))
        if pairs is None or (one, two) in pairs or (two, one) in pairs:
            _both_ways(table, (one, nodes[one][0]), (two, nodes[two][0]), device)
    dist.all_reduce(table)
    count = range(len(nodes))
    rates = {(one, other): float(table[one, other]) for one in count for other in count}
    return {pair: rate for pair, rate in rates.items() if rate > 0}


def _both_ways(table: torch.Tensor, one: tuple[int, int], other: tuple[int, int],
               device: torch.device) -> None:  # fmt: skip
    for (source, sender), (target, receiver) in ((one, other), (other, one)):
        rate = _send(receiver, device) if dist.get_rank() == sender else _receive(sender, device)
        if dist.get_rank() == receiver:
            table[source, target] = max(rate, float(table[source, target]))


def _send(to: int, device: torch.device) -> float:
    """A small message, then one that takes about a fifth of a second, as the receiver asks."""
    dist.send(torch.empty(FIRST, dtype=torch.uint8, device=device), to)
    wanted = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(wanted, to)
    payload = torch.empty(int(wanted.item()), dtype=torch.uint8, device=device)
    dist.recv(wanted, to)  # ready
    dist.send(payload, to)
    _synchronise(device)
    return 0.0


def _receive(of: int, device: torch.device) -> float:
    first = torch.empty(FIRST, dtype=torch.uint8, device=device)
    began = time.perf_counter()
    dist.recv(first, of)
    _synchronise(device)
    rate = FIRST / max(time.perf_counter() - began, 1e-9)
    size = int(min(LARGEST, max(FIRST, rate * WANTED_S)))
    asked = torch.tensor([size], dtype=torch.int64, device=device)
    payload = torch.empty(size, dtype=torch.uint8, device=device)
    dist.send(asked, of)
    dist.send(asked, of)
    began = time.perf_counter()
    dist.recv(payload, of)
    _synchronise(device)
    return size / max(time.perf_counter() - began, 1e-9)


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
