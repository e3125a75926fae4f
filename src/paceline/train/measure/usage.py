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
    """Looks at this rank's process, host and device; :meth:`figures` puts all ranks together.

    An accelerator's load is known where NVML is (the package ``nvidia-ml-py``); what torch itself
    knows, its memory, is there without.

    Args:
        comms: Of all ranks.
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
        mine = self._look()
        rows = self._comms.rows(torch.tensor(list(mine.values()), dtype=torch.float64))
        found: dict[str, float] = {}
        for name, column in zip(mine, rows.T.tolist(), strict=True):
            known = [one for one in column if not math.isnan(one)]
            if not known:
                continue
            found[name] = round(sum(known) / len(known), 3)
            if not self._comms.alone:
                found |= {f"{name}_min": round(min(known), 3), f"{name}_max": round(max(known), 3)}
        return found

    def _look(self) -> dict[str, float]:
        """The same names on every rank; what is not known is NaN."""
        device = self._comms.device
        found = {
            "cpu_percent": self._process.cpu_percent(),
            "memory_gib": self._process.memory_info().rss / _GIB,
            "host_cpu_percent": psutil.cpu_percent(),
            "host_memory_percent": psutil.virtual_memory().percent,
        }
        if device.type == "cpu":
            return found
        library = torch.get_device_module(device)
        return found | {
            "gpu_percent": _known(lambda: library.utilization(device)),
            "gpu_memory_gib": _known(lambda: library.max_memory_allocated(device) / _GIB),
            "gpu_memory_percent": _known(lambda: _taken(*library.mem_get_info(device))),
        }


def _taken(free: int, total: int) -> float:
    return 100 * (1 - free / total)


def _known(look: Callable[[], float]) -> float:
    """NaN where this torch, driver or machine does not tell."""
    with contextlib.suppress(Exception):
        return float(look())
    return math.nan
