"""What a session records besides losses: norms of its models, load of its processes and devices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from paceline.train import parallel
from paceline.train.comms import Comms

_GIB = float(1 << 30)


@dataclass(eq=False)
class NormAndLoadWatch:
    """Records norms and load, if it is switched on.

    Attributes:
        norm_interval: Steps between two looks at norms; 0: none.
    """

    _record: Callable[[str, Mapping[str, float]], None]
    norm_interval: int = 0
    usage: Usage | None = None
    _norms: dict[str, float] = field(default_factory=dict)

    def is_due(self, step: int) -> bool:
        return self.norm_interval > 0 and step % self.norm_interval == 0

    def add(self, model: str, norms: Mapping[str, float]) -> None:
        """Adds the norms of one model's update; the only model has no name."""
        self._norms |= {f"{model}_{key}" if model else key: value for key, value in norms.items()}

    def stepped(self) -> None:
        if self._norms:
            self._record("norms", self._norms)
            self._norms = {}

    def recorded(self) -> None:
        """Records the load of devices; a collective."""
        if self.usage is not None:
            self._record("usage", self.usage.figures())


class Norms:
    """Norms around one optimizer step; made right before it, with unscaled gradients.

    A collective where parameters are sharded.

    Args:
        optimizer: Whose parameters are looked at; each of several groups also by itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [[*group["params"]] for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group]
        self._groups = {"": parameters}
        if len(groups) > 1:
            self._groups |= {f"_group{number}": group for number, group in enumerate(groups)}
        self._gradients = {
            name: _norm(p.grad for p in group if p.grad is not None)
            for name, group in self._groups.items()
        }
        self._former_weights = {parameter: parameter.detach().clone() for parameter in parameters}

    def figures(self) -> dict[str, float]:
        """Norm of the gradient before clipping and of the weights before the step, and how much
        of the latter the step has changed; called right after the step."""
        figures: dict[str, float] = {}
        former = self._former_weights
        for name, group in self._groups.items():
            weights = _norm(former[parameter] for parameter in group)
            changes = _norm(parameter.detach() - former[parameter] for parameter in group)
            figures[f"grad_norm{name}"] = self._gradients[name]
            figures[f"weight_norm{name}"] = weights
            figures[f"update_ratio{name}"] = changes / max(weights, torch.finfo(torch.float32).tiny)
        return figures


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(parallel.full_tensor(get_total_norm(tensors)))


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
        local_norms = self._read()
        rows = self._comms.rows(torch.tensor(list(local_norms.values()), dtype=torch.float64))
        figures: dict[str, float] = {}
        for name, column in zip(local_norms, rows.T.tolist(), strict=True):
            values = [value for value in column if not math.isnan(value)]
            if values:
                figures[name] = sum(values) / len(values)
            if values and not self._comms.is_alone:
                figures |= {f"{name}_min": min(values), f"{name}_max": max(values)}
        return {name: round(value, 3) for name, value in figures.items()}

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

        def used_percent() -> float:
            free, total = library.mem_get_info(device)
            return 100 * (1 - float(free) / float(total))

        return usage | {
            "gpu_percent": _or_nan(lambda: library.utilization(device)),
            "gpu_memory_gib": _or_nan(lambda: library.max_memory_allocated(device) / _GIB),
            "gpu_memory_percent": _or_nan(used_percent),
        }


def _or_nan(read: Callable[[], float]) -> float:
    """Returns NaN if this torch, driver or machine does not tell."""
    with contextlib.suppress(Exception):
        return float(read())
    return math.nan
