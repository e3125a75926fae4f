"""Chooses the CPUs that each rank is bound to, and the GPUs that it sees. Pure.

A rank gets whole cores, all of their threads, as near as can be to its GPU, and only what the
node's agent may use itself: a cpuset, a container or a scheduler may have left it a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]
Core = tuple[int, ...]  # its CPUs
Binding = list[tuple[int, ...]]  # CPUs by local rank; empty for none

# Variables that select GPUs, by maker; each selects from what the next one leaves
MASKS = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "intel": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
}
_BUILT_FOR = {"nvidia": "cuda", "amd": "hip", "intel": "xpu"}
_MIN_CORES_USED = 3 / 4  # share of the cores that splitting within NUMA nodes must use


# --- GPUs


def gpus_seen(facts: Facts, environ: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Returns the GPUs that a node's ranks see, in torch's order.

    Args:
        facts: Facts of the node. Only GPUs count for which its torch was built, if it says so.
        environ: Environment of the ranks.
    """
    present: list[Mapping[str, Any]] = (facts.get("devices") or {}).get("gpus") or []
    torch = facts.get("torch") or {}
    built = [maker for maker, key in _BUILT_FOR.items() if torch.get(key)]
    makers = built or dict.fromkeys(gpu["maker"] for gpu in present)
    seen = []
    for maker in makers:
        selected = [gpu for gpu in present if gpu["maker"] == maker]
        if environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE" and maker == "intel":
            by_card = {gpu["pci"]: gpu for gpu in selected}  # one for all tiles of a card
            selected = list(by_card.values())
        for name in _masks(maker, environ):
            selected = _selected(selected, name, environ[name])
        seen += selected
    return seen


def _masks(maker: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the variables that select GPUs, in the order in which they act."""
    names = [name for name in reversed(MASKS[maker]) if name in environ]
    if "HIP_VISIBLE_DEVICES" in names and "CUDA_VISIBLE_DEVICES" in names:
        names.remove("CUDA_VISIBLE_DEVICES")  # to HIP it is another name for the same
    return names


def _selected(gpus: list[Mapping[str, Any]], name: str, mask: str) -> list[Mapping[str, Any]]:
    if name == "ONEAPI_DEVICE_SELECTOR":
        return _by_selector(gpus, mask)
    if name == "ZE_AFFINITY_MASK":  # empty means all to Level Zero; "0.1" is a tile of card 0
        cards = [tile.partition(".")[0] for tile in mask.split(",") if tile.strip()]
        return _numbered(gpus, cards) if cards else gpus
    return _numbered(gpus, mask.split(","))


def _numbered(gpus: list[Mapping[str, Any]], identifiers: Sequence[str]) -> list[Mapping[str, Any]]:
    """Selects GPUs by number or unique name, up to the first identifier that is neither."""
    selected: list[Mapping[str, Any]] = []
    for identifier in (identifier.strip() for identifier in identifiers):
        if identifier.upper().startswith(("GPU-", "MIG-")):  # which one, only the driver knows
            selected.append({"maker": "", "node": -1})
        elif identifier.isdigit() and int(identifier) < len(gpus):
            selected.append(gpus[int(identifier)])
        else:
            break
    return selected


def _by_selector(gpus: list[Mapping[str, Any]], mask: str) -> list[Mapping[str, Any]]:
    """Selects GPUs by a mask such as ``level_zero:0,1;opencl:*``; torch uses Level Zero."""
    terms = [term.strip() for term in mask.lower().split(";")]
    selected: list[Mapping[str, Any]] = []
    for backend, _, devices in (term.partition(":") for term in terms):
        identifiers = [identifier.strip().partition(".")[0] for identifier in devices.split(",")]
        if backend in ("level_zero", "*"):
            selected += gpus if {"*", "gpu"} & set(identifiers) else _numbered(gpus, identifiers)
    only_refuses = all(term.startswith("!") for term in terms)
    return gpus if only_refuses else selected


# --- CPUs


def cores_of(facts: Facts) -> list[Core]:
    """Returns the cores that a node's agent may use, sorted by NUMA node."""
    cpu = facts.get("cpu") or {}
    allowed = set(cpu.get("available", ()))
    cores = [tuple(sorted(allowed & set(core))) for core in cpu.get("cores") or ()]
    listed = {cpu_number for core in cores for cpu_number in core}
    cores += [(cpu_number,) for cpu_number in allowed - listed]
    return sorted((core for core in cores if core), key=lambda core: (_node_of(cpu, core), core))


def _node_of(cpu: Mapping[str, Any], core: Core) -> int:
    nodes = cpu.get("nodes") or {}
    return next((int(name) for name, cpus in nodes.items() if core[0] in cpus), -1)


def bind(facts: Facts, processes: int, gpus: Sequence[Mapping[str, Any]]) -> Binding:
    """Returns the CPUs of each local rank; empty for a single rank, or if they are too many.

    Args:
        gpus: GPUs that they see, one for each local rank; fewer if they compute on CPUs.
    """
    cores, cpu = cores_of(facts), facts.get("cpu") or {}
    if processes > len(cores):  # hardware threads of one core
        cores = [(cpu_number,) for core in cores for cpu_number in core]
    if processes == 1 or processes > len(cores):
        return [()] * processes
    by_node: dict[int, list[Core]] = {}
    for core in cores:
        by_node.setdefault(_node_of(cpu, core), []).append(core)
    numa_nodes = [int(gpu.get("node", -1)) for gpu in gpus[:processes]]
    shares = _split_near_gpus(by_node, numa_nodes) if len(numa_nodes) == processes else None
    shares = shares or _split_within_nodes(by_node, processes) or _split_evenly(cores, processes)
    return [tuple(sorted(cpu_number for core in share for cpu_number in core)) for share in shares]


def _split_near_gpus(by_node: Mapping[int, list[Core]],
                     numa_nodes: Sequence[int]) -> list[list[Core]] | None:  # fmt: skip
    """Gives each rank cores of its GPU's NUMA node; ``None`` if that is impossible."""
    ranks = {node: numa_nodes.count(node) for node in numa_nodes}
    if any(len(by_node.get(node, ())) < count for node, count in ranks.items()) or -1 in ranks:
        return None
    shares = {node: _split_evenly(by_node[node], count) for node, count in ranks.items()}
    return [shares[node].pop(0) for node in numa_nodes]


def _split_within_nodes(
    by_node: Mapping[int, list[Core]], processes: int
) -> list[list[Core]] | None:
    """Returns equal shares within NUMA nodes; ``None`` if that left many cores idle."""
    total = sum(map(len, by_node.values()))
    for share in range(total // processes, 0, -1):
        if sum(len(cores) // share for cores in by_node.values()) >= processes:
            break
    if share * processes < _MIN_CORES_USED * total or processes < len(by_node):
        return None
    pieces = [
        cores[at : at + share]
        for cores in by_node.values()
        for at in range(0, len(cores) - share + 1, share)
    ]
    return pieces[:processes]


def _split_evenly(cores: Sequence[Core], processes: int) -> list[list[Core]]:
    share = len(cores) // processes
    return [list(cores[at * share : (at + 1) * share]) for at in range(processes)]


def threads(facts: Facts, processes: int, binding: Binding) -> int:
    """Returns the threads of each rank: one per core, within its quota."""
    cores = cores_of(facts)
    core_counts = [sum(1 for core in cores if set(core) & set(cpus)) for cpus in binding if cpus]
    share = min(core_counts) if core_counts else len(cores) // processes
    quota = (facts.get("cpu") or {}).get("quota")
    if quota is not None:
        share = min(share, math.ceil(quota / processes))
    return max(1, share)
