"""Tests the detection of GPUs, CPU cores and NUMA nodes in recorded files of real machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.agent.surveys import accelerators, facts

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "sysfs"


def tree(name: str, root: Path) -> Path:
    """Creates the recorded files of a machine.

    Each line of a recording is ``PATH``, ``PATH = LINE | LINE`` or ``PATH -> TARGET``.
    """
    for line in (FIXTURES / f"{name}.txt").read_text().splitlines():
        path, is_link, target = line.partition(" -> ")
        name, _, content = path.partition(" = ")
        if line.startswith("#"):
            continue
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if is_link:
            (root / name).symlink_to(target)
        else:
            (root / name).write_text(content.replace(" | ", "\n"))
    return root


@pytest.mark.parametrize(
    ("machine", "gpus"),
    [
        ("mi100x2", ["amd renderD128 0000:23:00.0 0", "amd renderD129 0000:a3:00.0 1"]),
        ("desktop", ["amd renderD128 0000:05:00.0 -1"]),
        ("max1550", ["intel renderD128 0000:29:00.0 0"] * 2
                    + ["intel renderD129 0000:9a:00.0 1"] * 2),
        ("arc", ["intel renderD129 0000:03:00.0 -1"]),
        ("nvidia", ["nvidia nvidia3 0000:3b:00.0 0", "nvidia nvidia1 0000:af:00.0 1",
                    "nvidia nvidia0 0000:d8:00.0 1"]),
        ("two-sockets", []),
    ],
)  # fmt: skip
def test_find_gpus(machine: str, gpus: list[str], tmp_path: Path) -> None:
    detected = accelerators.find_gpus(tree(machine, tmp_path))
    assert [" ".join(map(str, gpu.values())) for gpu in detected] == gpus


@pytest.mark.parametrize(("machine", "missing"), [("mi100x2", "dev/kfd"),
                                                  ("arc", "dev/dri/renderD129")])  # fmt: skip
def test_container_without_device_has_no_gpu(machine: str, missing: str, tmp_path: Path) -> None:
    root = tree(machine, tmp_path)
    (root / missing).unlink()
    assert accelerators.find_gpus(root) == []


def test_ignores_damaged_files(tmp_path: Path) -> None:
    root = tree("mi100x2", tmp_path)
    for file in root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
        file.write_text("simd_count\n\0 1 2\ncpu_cores_count x\n")
    assert accelerators.find_gpus(root) == []


def test_cpu_cores_and_numa_nodes(tmp_path: Path) -> None:
    root = tree("two-sockets", tmp_path)
    cpus = set(range(16))
    assert facts.cpu_cores(cpus, root) == [[cpu, cpu + 8] for cpu in range(8)]
    assert facts.numa_nodes(cpus, root) == {
        "0": [0, 1, 2, 3, 8, 9, 10, 11],
        "1": [4, 5, 6, 7, 12, 13, 14, 15],
    }
    assert facts.cpu_cores({1, 9, 4, 99}, root) == [[1, 9], [4], [99]]
    assert facts.numa_nodes({1, 9}, root) == {"0": [1, 9]}


def test_cpu_quota_of_container(tmp_path: Path) -> None:
    root = tree("two-sockets", tmp_path)
    assert facts.cpu_quota(root) == 2.5
    (root / "sys/fs/cgroup/system.slice/docker-1.scope/cpu.max").write_text("max 100000")
    assert facts.cpu_quota(root) == 6.0
    cgroup_v1 = root / "sys/fs/cgroup/cpu/a"
    cgroup_v1.mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/a\n1:name=systemd:/\n")
    assert facts.cpu_quota(root) is None
    (cgroup_v1 / "cpu.cfs_quota_us").write_text("-1")
    (cgroup_v1 / "cpu.cfs_period_us").write_text("100000")
    assert facts.cpu_quota(root) is None
    (cgroup_v1 / "cpu.cfs_quota_us").write_text("50000")
    assert facts.cpu_quota(root) == 0.5


def test_parse_cpu_list() -> None:
    assert facts.parse_cpu_list("0-2,8") == {0, 1, 2, 8}
    assert facts.parse_cpu_list("") == facts.parse_cpu_list("x") == set()
