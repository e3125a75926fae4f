"""How busy the ranks' processes, hosts and accelerators are."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import psutil
import torch

from paceline.train.comms import Comms

_GIB = float(1 << 30)


class Usage:
    """Measures load of this rank's process, host and device; :meth:`figures` gathers all ranks.

    An accelerator's load is known where NVML is (the package ``nvidia-ml-py``); what torch itself
    knows, its memory, is there without.
    """

    def __init__(self, comms: Comms) -> None:
        self._comms, self._process = comms, psutil.Process()
        self._process.cpu_percent(), psutil.cpu_percent()  # later calls look back to these

    def figures(self) -> dict[str, float]:
        """Since the last call: means over the ranks, and the extremes where there are several.

        ``cpu_percent`` (of one CPU) and ``memory_gib`` are the process's, ``host_…`` its host's,
        ``gpu_…`` its accelerator's; ``gpu_memory_gib`` is the most that tensors have taken. A
        collective.
        """
        own = self._read()
        rows = self._comms.rows(torch.tensor(list(own.values()), dtype=torch.float64))
        figures: dict[str, float] = {}
        for name, column in zip(own, rows.T.tolist(), strict=True):
            values = [value for value in column if not math.isnan(value)]
            if not values:
                continue
            figures[name] = round(sum(values) / len(values), 3)
            if not self._comms.is_alone:
                figures |= {
                    f"{name}_min": round(min(values), 3),
                    f"{name}_max": round(max(values), 3),
                }
        return figures

    def _read(self) -> dict[str, float]:
        """Returns the same names on every rank; unknown values are NaN."""
        device = self._comms.device
        usage = {
            "cpu_percent": self._process.cpu_percent(),
            "memory_gib": self._process.memory_info().rss / _GIB,
            "host_cpu_percent": psutil.cpu_percent(),
            "host_memory_percent": psutil.virtual_memory().percent,
        }
        if device.type == "cpu":
            return usage
        library = torch.get_device_module(device)
        return usage | {
            "gpu_percent": _or_nan(lambda: library.utilization(device)),
            "gpu_memory_gib": _or_nan(lambda: library.max_memory_allocated(device) / _GIB),
            "gpu_memory_percent": _or_nan(lambda: _used_percent(*library.mem_get_info(device))),
        }


def _used_percent(free: int, total: int) -> float:
    return 100 * (1 - free / total)


def _or_nan(read: Callable[[], float]) -> float:
    """Returns NaN if this torch, driver or machine does not tell."""
    with contextlib.suppress(Exception):
        return float(read())
    return math.nan
