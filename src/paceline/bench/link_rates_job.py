"""Measures hosts and the links between them, in the ranks of ``paceline bench collectives``.

The rates are those of the backend, with its own buffers, protocol and network cards. A ping or a
TCP transfer may use another path.
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

from paceline.bench.link_rates import HostRates, LinkRates, measure_rates, num_turns, peer
from paceline.spec import jobenv

COPY_BYTES = 32 << 20
NUM_COPIES = 4
MIN_MESSAGE_BYTES = 1 << 20  # also the size of the first message, which determines the second
MAX_MESSAGE_BYTES = 64 << 20
MESSAGE_S = 0.2  # target duration of the second message
MAX_TURNS = 15
MAX_INFO_BYTES = 512  # of what a rank shares with the others


def measure(device: torch.device) -> LinkRates:
    """Measures all hosts and links; every rank gets the result."""
    infos = gather(_rank_info(device), device)
    by_node: dict[int, list[int]] = {}
    for rank, info in enumerate(infos):
        by_node.setdefault(info["node"], []).append(rank)
    nodes = [by_node[node] for node in sorted(by_node)]
    names = [infos[ranks[0]]["host"] for ranks in nodes]
    hosts = tuple(_host_rates([infos[rank] for rank in ranks]) for ranks in nodes)
    rates = measure_rates(lambda pairs: _measure_pairs(nodes, device, pairs))
    return LinkRates(hosts, {(names[source], names[target]): rate
                             for (source, target), rate in rates.items()})  # fmt: skip


def gather(info: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Gathers a small object of every rank, as JSON, without pickle and for every backend."""
    data = json.dumps(info).encode()[:MAX_INFO_BYTES].ljust(MAX_INFO_BYTES)
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    return [json.loads(bytes(tensor.cpu().numpy()).decode()) for tensor in received]


def _rank_info(device: torch.device) -> dict[str, Any]:
    dist.barrier()  # all ranks copy at the same time, as in a collective
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    bus_rate = 0.0
    if device.type != "cpu":
        pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        bus_rate = _copy_rate(pinned, device)
    return {
        "node": int(os.environ.get(jobenv.GROUP_RANK, "0")),
        "host": os.environ.get(jobenv.HOST, "")[:200],
        "device": device_name(device)[:80],
        "copy": _copy_rate(on_device, device),
        "bus": bus_rate,
        "slot": _pcie_link(device),
    }


def device_name(device: torch.device) -> str:
    """The device's name, or ``CPU``."""
    if device.type == "cpu":
        return "CPU"
    return str(getattr(torch, device.type).get_device_name(device))


def _copy_rate(source: torch.Tensor, device: torch.device) -> float:
    """Bytes per second of the fastest of some copies."""
    target = torch.zeros_like(source, device=device)
    durations = []
    for _ in range(NUM_COPIES):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        durations.append(time.perf_counter() - start)
    return COPY_BYTES / max(min(durations), 1e-9)


def _pcie_link(device: torch.device) -> str:
    """The PCIe link of an NVIDIA GPU: rate and number of lanes."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, card = (int(getattr(properties, name, -1)) for name in names)
    folder = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{card:02x}.0")
    try:
        speed = (folder / "current_link_speed").read_text().strip()
        return f"{speed} x{(folder / 'current_link_width').read_text().strip()}"
    except OSError:
        return ""


def _host_rates(infos: list[dict[str, Any]]) -> HostRates:
    """The rates of a host, which are those of its slowest rank."""
    copy, bus = (min(float(info[name]) for info in infos) for name in ("copy", "bus"))
    return HostRates(infos[0]["host"], infos[0]["device"], copy, bus, infos[0]["slot"])


def _measure_pairs(
    nodes: list[list[int]], device: torch.device, pairs: Collection[tuple[int, int]] | None
) -> dict[tuple[int, int], float]:
    """Bytes per second from node to node. A collective call: every rank gets the result.

    Args:
        pairs: Links to measure, in both directions; ``None`` for all, including those between the
            first two ranks of each node.
    """
    table = torch.zeros(len(nodes), len(nodes), dtype=torch.float64, device=device)
    rank = dist.get_rank()
    for index, ranks in enumerate(nodes if pairs is None else ()):
        if len(ranks) > 1 and rank in ranks[:2]:
            _measure_pair(table, (index, ranks[0]), (index, ranks[1]), device)
    node = next((index for index, ranks in enumerate(nodes) if ranks[0] == rank), None)
    for turn in range(min(num_turns(len(nodes)), MAX_TURNS)):
        dist.barrier()
        partner = None if node is None else peer(node, turn, len(nodes))
        if node is None or partner is None:
            continue
        low, high = sorted((node, partner))
        if pairs is None or (low, high) in pairs or (high, low) in pairs:
            _measure_pair(table, (low, nodes[low][0]), (high, nodes[high][0]), device)
    dist.all_reduce(table)
    return {(source, target): rate for source, row in enumerate(table.tolist())
            for target, rate in enumerate(row) if rate > 0}  # fmt: skip


def _measure_pair(table: torch.Tensor, first: tuple[int, int], second: tuple[int, int],
                  device: torch.device) -> None:  # fmt: skip
    """Measures both directions between two ranks, given as pairs of node and rank."""
    for (source, sender), (target, receiver) in ((first, second), (second, first)):
        if dist.get_rank() == sender:
            _send(receiver, device)
        else:
            table[source, target] = max(_receive(sender, device), float(table[source, target]))


def _send(receiver: int, device: torch.device) -> None:
    """Sends a small message, then one of the size that the receiver requests."""
    dist.send(torch.empty(MIN_MESSAGE_BYTES, dtype=torch.uint8, device=device), receiver)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, receiver)
    payload = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.recv(size, receiver)  # the receiver is ready
    dist.send(payload, receiver)
    synchronize(device)


def _receive(sender: int, device: torch.device) -> float:
    """The rate of the second of two messages."""
    rate = _timed_receive(sender, MIN_MESSAGE_BYTES, device)
    num_bytes = int(min(MAX_MESSAGE_BYTES, max(MIN_MESSAGE_BYTES, rate * MESSAGE_S)))
    size = torch.tensor([num_bytes], dtype=torch.int64, device=device)
    dist.send(size, sender)
    return _timed_receive(sender, num_bytes, device, size)


def _timed_receive(sender: int, num_bytes: int, device: torch.device,
                   ready: torch.Tensor | None = None) -> float:  # fmt: skip
    """Bytes per second of a message; ``ready`` is sent before it."""
    payload = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if ready is not None:
        dist.send(ready, sender)
    start = time.perf_counter()
    dist.recv(payload, sender)
    synchronize(device)
    return num_bytes / max(time.perf_counter() - start, 1e-9)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
