"""Finds GPUs of three makers in kernel files, without driver libraries, in PCI bus order.

GPUs without a device file (containers) or with shared memory (laptops) are not counted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List

from ..supervision.processes import read_text

Gpu = Dict[str, Any]  # "maker", "device" (file's name), "pci" (may be empty), "node" (NUMA, or -1)
ROOT = Path("/")
INTEL_VENDOR = "0x8086"
INTEL_PROCESSOR_GRAPHICS = "0000:00:02.0"  # its place in every processor that has one
# What AMD's integrated graphics take of the machine's memory by themselves is less
MIN_AMD_BYTES = 2 << 30  # bytes
AMD_DEVICE_HEAPS = ("1", "2")  # heap types of KFD: the card's, seen by the processor or not


def find_gpus(root: Path = ROOT) -> List[Gpu]:
    """Returns all GPUs, grouped by maker."""
    return nvidia(root) + amd(root) + intel(root)


def nvidia(root: Path = ROOT) -> List[Gpu]:
    """Finds NVIDIA GPUs by their device files; the driver may report their PCI addresses."""
    places = {}
    for file in root.glob("proc/driver/nvidia/gpus/*/information"):
        match = re.search(r"^Device Minor:\s*(\d+)", read_text(file), re.MULTILINE)
        if match:
            places["nvidia%s" % match.group(1)] = file.parent.name.lower()
    files = [path.name for path in root.glob("dev/nvidia*")]
    names = [name for name in files if re.fullmatch(r"nvidia\d+", name)]
    gpus = [_gpu(root, "nvidia", name, places.get(name, "")) for name in names]
    return sorted(gpus, key=lambda gpu: (gpu["pci"], int(gpu["device"][len("nvidia") :])))


def amd(root: Path = ROOT) -> List[Gpu]:
    """Finds AMD GPUs by the nodes of KFD, which ROCm uses."""
    gpus = []
    if (root / "dev/kfd").exists():
        for folder in root.glob("sys/class/kfd/kfd/topology/nodes/*"):
            properties = _properties(folder / "properties")
            device = "renderD%s" % properties.get("drm_render_minor", "")
            has_cpus = bool(int(properties.get("cpu_cores_count", 0)))
            computes = int(properties.get("simd_count", 0)) and not has_cpus
            is_accessible = (root / "dev/dri" / device).exists()
            if computes and is_accessible and _kfd_memory(folder) >= MIN_AMD_BYTES:
                gpus.append((int(folder.name), _gpu(root, "amd", device, _kfd_place(properties))))
    return [gpu for _, gpu in sorted(gpus, key=lambda numbered: numbered[0])]


def _kfd_memory(folder: Path) -> int:
    banks = [_properties(file) for file in folder.glob("mem_banks/*/properties")]
    device_banks = [bank for bank in banks if bank.get("heap_type") in AMD_DEVICE_HEAPS]
    return sum(int(bank.get("size_in_bytes", 0)) for bank in device_banks)


def _kfd_place(properties: Dict[str, str]) -> str:
    """Returns a PCI address from KFD's number, which packs bus, device and function."""
    packed = int(properties.get("location_id", 0))
    parts = (int(properties.get("domain", 0)), packed >> 8 & 0xFF, packed >> 3 & 0x1F, packed & 7)
    return "%04x:%02x:%02x.%x" % parts


def intel(root: Path = ROOT) -> List[Gpu]:
    """Finds Intel GPUs of the drivers i915 and xe, one per tile as Level Zero counts them."""
    gpus = []
    for folder in root.glob("sys/class/drm/renderD*"):
        device = folder / "device"
        driver = (device / "driver").resolve().name
        place = device.resolve().name
        is_supported = read_text(device / "vendor") == INTEL_VENDOR and driver in ("i915", "xe")
        is_accessible = (root / "dev/dri" / folder.name).exists()
        if is_supported and is_accessible and place != INTEL_PROCESSOR_GRAPHICS:
            gpu = _gpu(root, "intel", folder.name, place)
            gpus += [gpu] * max(1, _tiles(device, driver))
    return sorted(gpus, key=lambda gpu: str(gpu["pci"]))


def _tiles(device: Path, driver: str) -> int:
    """Counts a card's tiles: i915 has one "gt" per tile, xe several."""
    pattern = "tile[0-9]*" if driver == "xe" else "drm/card*/gt/gt[0-9]*"
    return len(list(device.glob(pattern)))


def _gpu(root: Path, maker: str, device: str, place: str) -> Gpu:
    node = read_text(root / "sys/bus/pci/devices" / place / "numa_node") if place else ""
    number = int(node) if re.fullmatch(r"-?\d+", node) else -1
    return {"maker": maker, "device": device, "pci": place, "node": number}


def _properties(path: Path) -> Dict[str, str]:
    """Parses KFD's properties, one ``name value`` per line."""
    pairs = (line.split() for line in read_text(path).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
