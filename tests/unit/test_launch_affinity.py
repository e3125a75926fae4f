"""Tests which GPUs are visible to ranks, and which CPU cores near their GPU they are bound to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.planning import affinity

# two sockets of four cores with two threads each
SERVER = {
    "available": list(range(16)),
    "cores": [[cpu, cpu + 8] for cpu in range(8)],
    "nodes": {"0": [0, 1, 2, 3, 8, 9, 10, 11], "1": [4, 5, 6, 7, 12, 13, 14, 15]},
}


def machine(cpu: dict[str, Any] | None = None, gpus: Sequence[str] = (), **torch: str) -> Any:
    """Returns facts of a node; ``nvidia@1`` is a GPU of that maker on NUMA node 1."""
    listed = [spec.partition("@") for spec in gpus]
    return {
        "cpu": {**SERVER, **(cpu or {})},
        "torch": torch or None,
        "devices": {"gpus": [{"maker": maker, "device": f"{maker}{at}", "node": int(node or -1)}
                             for at, (maker, _, node) in enumerate(listed)]},
    }  # fmt: skip


def visible_devices(facts: Any, **environ: str) -> list[str]:
    return [str(gpu.get("device", "?")) for gpu in affinity.gpus_seen(facts, environ)]


@pytest.mark.parametrize(
    ("mask", "visible"),
    [("0,1", [0, 1]), ("2", [2]), ("3,0", [3, 0]), ("", []), ("-1", []), ("0,9,1", [0]),
     (" 1 , 2 ", [1, 2]), ("NoDevFiles", [])],
)  # fmt: skip
def test_visibility_masks_select_gpus(mask: str, visible: list[int]) -> None:
    nvidia, amd = machine(gpus=["nvidia"] * 4), machine(gpus=["amd"] * 4)
    assert visible_devices(nvidia, CUDA_VISIBLE_DEVICES=mask) == [f"nvidia{at}" for at in visible]
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        assert visible_devices(amd, **{name: mask}) == [f"amd{at}" for at in visible]
    if mask:
        assert visible_devices(machine(gpus=["intel"] * 4), ZE_AFFINITY_MASK=mask) == [
            f"intel{at}" for at in visible
        ]


def test_uuid_masks_count_as_unknown_gpus() -> None:
    assert visible_devices(
        machine(gpus=["nvidia"] * 4), CUDA_VISIBLE_DEVICES="GPU-1a2b,MIG-3c"
    ) == ["?", "?"]


def test_hip_mask_applies_to_gpus_of_rocr_mask() -> None:
    four_gpus = machine(gpus=["amd"] * 4)
    assert visible_devices(four_gpus, ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="1") == [
        "amd3"
    ]
    assert visible_devices(four_gpus, HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1,2") == [
        "amd0"
    ]


@pytest.mark.parametrize(
    ("selector", "visible"),
    [("level_zero:0,1", 2), ("level_zero:gpu", 4), ("*:*", 4), ("opencl:*", 0),
     ("opencl:gpu;level_zero:2", 1), ("!opencl:*", 4), ("LEVEL_ZERO:0.1", 1)],
)  # fmt: skip
def test_oneapi_device_selectors(selector: str, visible: int) -> None:
    assert (
        len(visible_devices(machine(gpus=["intel"] * 4), ONEAPI_DEVICE_SELECTOR=selector))
        == visible
    )


def test_composite_hierarchy_merges_tiles() -> None:
    cards = [{"maker": "intel", "device": f"renderD{at}", "pci": str(at), "node": 0}
             for at in (128, 128, 129, 129)]  # fmt: skip
    facts = {"devices": {"gpus": cards}}
    assert len(visible_devices(facts)) == 4
    assert len(visible_devices(facts, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE")) == 2


def test_counts_only_gpus_supported_by_torch() -> None:
    both = ["nvidia", "intel"]
    assert visible_devices(machine(gpus=both, cuda="12.8")) == ["nvidia0"]
    assert visible_devices(machine(gpus=both, xpu="20250101")) == ["intel1"]
    assert visible_devices(machine(gpus=both, hip="6.4")) == []
    assert visible_devices(machine(gpus=both)) == [
        "nvidia0",
        "intel1",
    ]  # a CPU-only torch gives no hint


# --- CPUs


def bind_cpus(facts: Any, processes: int, gpus: Sequence[str] = ()) -> list[list[int]]:
    seen_gpus = affinity.gpus_seen(machine(gpus=gpus), {})
    return [list(cpus) for cpus in affinity.bind(facts, processes, seen_gpus)]


def test_binds_cores_within_numa_nodes() -> None:
    assert bind_cpus(machine(), 2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert bind_cpus(machine(), 4) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert bind_cpus(machine(), 3) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13]]
    assert bind_cpus(machine(), 8)[5] == [5, 13]
    assert bind_cpus(machine(), 16)[:2] == [
        [0],
        [8],
    ]  # one thread per rank if there are too few cores
    assert bind_cpus(machine(), 17) == [[]] * 17
    assert bind_cpus(machine(), 1) == [[]]


def test_binds_to_numa_node_of_gpu() -> None:
    on_second = ["nvidia@1", "nvidia@0"]
    assert bind_cpus(machine(), 2, on_second) == [[4, 5, 6, 7, 12, 13, 14, 15],
                                              [0, 1, 2, 3, 8, 9, 10, 11]]  # fmt: skip
    both_on_first = ["amd@0", "amd@0"]
    assert bind_cpus(machine(), 2, both_on_first) == [[0, 1, 8, 9], [2, 3, 10, 11]]
    unknown = ["nvidia@0", "nvidia@-1"]
    assert bind_cpus(machine(), 2, unknown) == bind_cpus(machine(), 2)
    assert bind_cpus(machine(), 2, ["intel@7", "intel@7"]) == bind_cpus(machine(), 2)


def test_binding_respects_cpu_mask_of_agent() -> None:
    """A scheduler's CPU mask may leave only one thread of some cores."""
    slurm = machine({"available": [4, 5, 12, 6]})
    assert bind_cpus(slurm, 2, ["nvidia@0", "nvidia@1"]) == [[4, 12], [5]]
    assert bind_cpus(slurm, 4) == [[4], [12], [5], [6]]


def test_binds_cpus_if_topology_is_unknown() -> None:
    no_topology = {"cpu": {"available": [0, 2, 4, 6, 8]}}
    assert bind_cpus(no_topology, 2) == [[0, 2], [4, 6]]
    assert bind_cpus({}, 2) == [[], []]


CPUS = st.sets(st.integers(0, 15), max_size=16)


@given(CPUS, st.integers(1, 20), st.lists(st.sampled_from(["nvidia@0", "nvidia@1", "amd"])))
def test_bindings_are_disjoint_and_allowed(
    allowed: set[int], processes: int, gpus: list[str]
) -> None:
    facts = machine({"available": sorted(allowed)})
    bindings = bind_cpus(facts, processes, gpus)
    bound_cpus = [cpu for cpus in bindings for cpu in cpus]
    assert len(bindings) == processes
    assert len(bound_cpus) == len(set(bound_cpus))
    assert set(bound_cpus) <= allowed
    assert len({bool(cpus) for cpus in bindings}) == 1
    threads = affinity.threads(facts, processes, affinity.bind(facts, processes, []))
    assert 1 <= threads <= max(1, len(allowed))


@pytest.mark.parametrize(
    ("processes", "quota", "threads"),
    [(1, None, 8), (2, None, 4), (16, None, 1), (20, None, 1), (1, 2.5, 3), (2, 2.5, 2)],
)
def test_thread_count_equals_cores_of_rank(
    processes: int, quota: float | None, threads: int
) -> None:
    facts = machine({"quota": quota})
    assert affinity.threads(facts, processes, affinity.bind(facts, processes, [])) == threads
