"""Reads the load of this host from the kernel's counters and the GPUs; cheap enough to repeat."""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from ..supervision.processes import read_text
from . import accelerators

LoadReader = Callable[[], List[float]]
ROOT = Path("/")
NVML = "libnvidia-ml.so.1"


def read_counters(interfaces: Sequence[str], root: Path = ROOT) -> Dict[str, Any]:
    """Returns the host's counters since boot and the load of its GPUs.

    ``time`` (monotonic), ``cpu`` (busy and all ticks), ``memory`` (total and available bytes),
    ``links`` (bytes received and sent by interface), ``gpus`` (busy fraction of each).
    """
    return {
        "time": time.monotonic(),
        "cpu": _cpu(read_text(root / "proc/stat")),
        "memory": memory_bytes(read_text(root / "proc/meminfo")),
        "links": link_bytes(read_text(root / "proc/self/net/dev"), interfaces),
        "gpus": _gpus(root),
    }


def _cpu(text: str) -> List[int]:
    fields = text.split("\n", 1)[0].split()[1:9]  # virtual machines are in the first two again
    ticks = [int(field) for field in fields if field.isdigit()]
    idle = sum(ticks[3:5])  # idle, and waiting for a disk
    return [sum(ticks) - idle, sum(ticks)]


def memory_bytes(text: str) -> List[int]:
    amounts = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable") and value.split()[:1]:
            amounts[name] = 1024 * int(value.split()[0])
    total = amounts.get("MemTotal", 0)
    return [total, min(total, amounts.get("MemAvailable", 0))]


def link_bytes(text: str, interfaces: Sequence[str]) -> Dict[str, List[int]]:
    totals = {}
    for line in text.splitlines():
        name, _, counts = line.strip().partition(":")
        fields = counts.split()
        if name in interfaces and len(fields) > 8:
            totals[name] = [int(fields[0]), int(fields[8])]
    return totals


# --- GPUs ---------------------------------------------------------------------------------------

_load_readers: Dict[Path, LoadReader] = {}


def _gpus(root: Path) -> List[float]:
    """Returns the GPUs' load of one maker; how to read it is found out once."""
    if root not in _load_readers:
        _load_readers[root] = _amd(root) or _nvidia(root) or list
    return _load_readers[root]()


def _amd(root: Path) -> Optional[LoadReader]:
    """Makes a reader of the AMD GPUs' load; ``None`` if there are none."""
    places = [root / "sys/class/drm" / gpu["device"] for gpu in accelerators.amd(root)]
    files = [place / "device/gpu_busy_percent" for place in places]

    def load() -> List[float]:
        percentages = filter(str.isdigit, map(read_text, files))
        return [min(1.0, int(percentage) / 100) for percentage in percentages]

    return load if files else None


def _nvidia(root: Path) -> Optional[LoadReader]:
    """Makes a reader of the NVIDIA GPUs' load; ``None`` if there are none, or no library.

    The kernel has no file with the load, and nvidia-smi is slow to start.
    """
    if not accelerators.nvidia(root):
        return None
    with contextlib.suppress(OSError, AttributeError):
        return nvml(ctypes.CDLL(NVML))
    return None


class _Rates(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]  # percent


def nvml(library: Any) -> Optional[LoadReader]:
    """Makes a reader of NVML; ``None`` if NVML cannot be initialised."""
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    handles = []
    for number in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0:
            handles.append(handle)

    def load() -> List[float]:
        fractions = []
        for handle in handles:
            rates = _Rates()
            if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0:
                fractions.append(min(1.0, rates.gpu / 100))
        return fractions

    return load if handles else None
