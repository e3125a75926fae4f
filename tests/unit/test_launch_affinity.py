"""Which GPUs ranks see, and which CPUs they are bound to: whole cores, near their GPU."""

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
    """Facts; a GPU is written ``nvidia@1``: its maker, and its NUMA node."""
    listed = [one.partition("@") for one in gpus]
    return {
        "cpu": {**SERVER, **(cpu or {})},
        "torch": torch or None,
        "devices": {"gpus": [{"maker": maker, "device": f"{maker}{at}", "node": int(node or -1)}
                             for at, (maker, _, node) in enumerate(listed)]},
    }  # fmt: skip


def seen(facts: Any, **environ: str) -> list[str]:
    return [str(gpu.get("device", "?")) for gpu in affinity.gpus_seen(facts, environ)]


@pytest.mark.parametrize(
    ("mask", "left"),
    [("0,1", [0, 1]), ("2", [2]), ("3,0", [3, 0]), ("", []), ("-1", []), ("0,9,1", [0]),
     (" 1 , 2 ", [1, 2]), ("NoDevFiles", [])],
)  # fmt: skip
def test_masks(mask: str, left: list[int]) -> None:
    nvidia, amd = machine(gpus=["nvidia"] * 4), machine(gpus=["amd"] * 4)
    assert seen(nvidia, CUDA_VISIBLE_DEVICES=mask) == [f"nvidia{at}" for at in left]
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        assert seen(amd, **{name: mask}) == [f"amd{at}" for at in left]
    if mask:
        assert seen(machine(gpus=["intel"] * 4), ZE_AFFINITY_MASK=mask) == [
            f"intel{at}" for at in left
        ]


def test_names_that_only_the_driver_knows_count() -> None:
    assert seen(machine(gpus=["nvidia"] * 4), CUDA_VISIBLE_DEVICES="GPU-1a2b,MIG-3c") == ["?", "?"]


def test_hip_selects_from_what_rocr_leaves() -> None:
    four = machine(gpus=["amd"] * 4)
    assert seen(four, ROCR_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="1") == ["amd3"]
    assert seen(four, HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1,2") == ["amd0"]


@pytest.mark.parametrize(
    ("selector", "left"),
    [("level_zero:0,1", 2), ("level_zero:gpu", 4), ("*:*", 4), ("opencl:*", 0),
     ("opencl:gpu;level_zero:2", 1), ("!opencl:*", 4), ("LEVEL_ZERO:0.1", 1)],
)  # fmt: skip
def test_selectors_of_oneapi(selector: str, left: int) -> None:
    assert len(seen(machine(gpus=["intel"] * 4), ONEAPI_DEVICE_SELECTOR=selector)) == left


def test_tiles_are_one_gpu_where_the_hierarchy_says_so() -> None:
    cards = [{"maker": "intel", "device": f"renderD{at}", "pci": str(at), "node": 0}
             for at in (128, 128, 129, 129)]  # fmt: skip
    facts = {"devices": {"gpus": cards}}
    assert len(seen(facts)) == 4
    assert len(seen(facts, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE")) == 2


def test_only_gpus_that_torch_computes_on_count() -> None:
    both = ["nvidia", "intel"]
    assert seen(machine(gpus=both, cuda="12.8")) == ["nvidia0"]
    assert seen(machine(gpus=both, xpu="20250101")) == ["intel1"]
    assert seen(machine(gpus=both, hip="6.4")) == []
    assert seen(machine(gpus=both)) == ["nvidia0", "intel1"]  # a torch for CPUs says nothing


# --- CPUs


def bound(facts: Any, processes: int, gpus: Sequence[str] = ()) -> list[list[int]]:
    near = affinity.gpus_seen(machine(gpus=gpus), {})
    return [list(cpus) for cpus in affinity.bind(facts, processes, near)]


def test_whole_cores_within_numa_nodes() -> None:
    assert bound(machine(), 2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert bound(machine(), 4) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert bound(machine(), 3) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13]]
    assert bound(machine(), 8)[5] == [5, 13]
    assert bound(machine(), 16)[:2] == [[0], [8]]  # a thread each, where cores do not suffice
    assert bound(machine(), 17) == [[]] * 17
    assert bound(machine(), 1) == [[]]


def test_near_the_gpu() -> None:
    on_second = ["nvidia@1", "nvidia@0"]
    assert bound(machine(), 2, on_second) == [[4, 5, 6, 7, 12, 13, 14, 15],
                                              [0, 1, 2, 3, 8, 9, 10, 11]]  # fmt: skip
    both_on_first = ["amd@0", "amd@0"]
    assert bound(machine(), 2, both_on_first) == [[0, 1, 8, 9], [2, 3, 10, 11]]
    unknown = ["nvidia@0", "nvidia@-1"]
    assert bound(machine(), 2, unknown) == bound(machine(), 2)
    assert bound(machine(), 2, ["intel@7", "intel@7"]) == bound(machine(), 2)


def test_only_what_the_agent_may_use() -> None:
    """A scheduler's mask that leaves one thread of some cores, all on the second node."""
    slurm = machine({"available": [4, 5, 12, 6]})
    assert bound(slurm, 2, ["nvidia@0", "nvidia@1"]) == [[4, 12], [5]]
    assert bound(slurm, 4) == [[4], [12], [5], [6]]


def test_a_machine_that_tells_nothing_of_its_cores() -> None:
    plain = {"cpu": {"available": [0, 2, 4, 6, 8]}}
    assert bound(plain, 2) == [[0, 2], [4, 6]]
    assert bound({}, 2) == [[], []]


CPUS = st.sets(st.integers(0, 15), max_size=16)


@given(CPUS, st.integers(1, 20), st.lists(st.sampled_from(["nvidia@0", "nvidia@1", "amd"])))
def test_ranks_share_no_cpu_and_get_none_that_is_not_allowed(
    allowed: set[int], processes: int, gpus: list[str]
) -> None:
    facts = machine({"available": sorted(allowed)})
    found = bound(facts, processes, gpus)
    every = [cpu for cpus in found for cpu in cpus]
    assert len(found) == processes
    assert len(every) == len(set(every))
    assert set(every) <= allowed
    assert len({bool(cpus) for cpus in found}) == 1
    threads = affinity.threads(facts, processes, affinity.bind(facts, processes, []))
    assert 1 <= threads <= max(1, len(allowed))


@pytest.mark.parametrize(
    ("processes", "quota", "threads"),
    [(1, None, 8), (2, None, 4), (16, None, 1), (20, None, 1), (1, 2.5, 3), (2, 2.5, 2)],
)
def test_threads_are_the_cores_of_a_rank(processes: int, quota: float | None, threads: int) -> None:
    facts = machine({"quota": quota})
    assert affinity.threads(facts, processes, affinity.bind(facts, processes, [])) == threads
