"""How this process computes: its device and backend, its precision, its seeds."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.spec.errors import SettingError
from paceline.spec.formatting import pluralize

KINDS = ("auto", "cpu", "cuda", "xpu")
BACKENDS = ("auto", "gloo", "nccl", "xccl", "ccl", "mpi")
ONECCL = "oneccl_bindings_for_pytorch"
_USABLE_MEMORY_PART = 0.9  # of the memory that is free
_BACKEND_OF = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
_DEVICES_OF = {
    "gloo": ("cpu", "cuda", "xpu"),
    "nccl": ("cuda",),
    "xccl": ("xpu",),
    "ccl": ("cpu", "xpu"),
    "mpi": ("cpu",),
}


@dataclass(frozen=True, slots=True)
class AvailableDevices:
    """Devices and backends of this machine's torch."""

    devices: dict[str, int]
    backends: frozenset[str]


def available_devices() -> AvailableDevices:
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "xccl": dist.is_xccl_available(),
        "ccl": importlib.util.find_spec(ONECCL) is not None,
        "mpi": dist.is_mpi_available(),
    }
    devices = {"cuda": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}
    return AvailableDevices(
        devices, frozenset(name for name, is_available in available.items() if is_available)
    )


def choose_device(requested: str, available: AvailableDevices, local_rank: int) -> torch.device:
    """Returns the device of this process: one accelerator for each local rank, or the CPU.

    Raises:
        SettingError: The device does not exist here, or there are fewer than local ranks.
    """
    if requested not in KINDS:
        raise SettingError(f"--device {requested}: unknown", remedy=f"one of {', '.join(KINDS)}")
    kind = requested
    if requested == "auto":
        kind = next((name for name in ("cuda", "xpu") if available.devices[name]), "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    count = available.devices[kind]
    if count == 0:
        built = torch.version.cuda if kind == "cuda" else getattr(torch.version, "xpu", None)
        reason = (
            "torch sees no device (driver?)" if built else f"this torch is built without {kind}"
        )
        raise SettingError(
            f"--device {kind}: no such device on this machine",
            found=f"torch {torch.__version__}: {reason}",
            remedy="--device cpu, or install a driver and a torch build that match the device",
        )
    if local_rank >= count:
        raise SettingError(
            f"--device {kind}: local rank {local_rank} needs a device of its own",
            found=f"{pluralize(count, f'{kind} device')} on this machine",
            remedy=f"--nproc-per-node {count}, or --device cpu",
        )
    return torch.device(kind, local_rank)


def choose_backend(requested: str, device: torch.device, available: AvailableDevices) -> str:
    """Returns the collective backend for a device.

    Raises:
        SettingError: The backend cannot move this device's tensors or is not built in.
    """
    if requested not in BACKENDS:
        raise SettingError(
            f"--backend {requested}: unknown", remedy=f"one of {', '.join(BACKENDS)}"
        )
    backend = _BACKEND_OF[device.type] if requested == "auto" else requested
    if device.type not in _DEVICES_OF[backend]:
        raise SettingError(
            f"--backend {backend} cannot be used with --device {device.type}",
            found=f"{backend} moves tensors of {' and '.join(_DEVICES_OF[backend])} devices only",
            remedy=f"--backend {_BACKEND_OF[device.type]}",
        )
    if backend not in available.backends:
        raise SettingError(
            f"--backend {backend}: this torch is built without it",
            found=f"torch {torch.__version__} has"
            f" {', '.join(sorted(available.backends)) or 'none'}",
            remedy="--backend gloo, or install a torch that has it",
        )
    if backend == "ccl":
        importlib.import_module(ONECCL)  # it joins torch when it is imported
    return backend


def configure_device(device: torch.device, deterministic: bool) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def batch_headroom(device: torch.device) -> float:
    """Returns how many times the peak memory so far this process could use.

    At least that many times as many samples fit, for parameters need no more. Unbounded for a CPU,
    whose memory is the whole host's.
    """
    if device.type == "cpu":
        return math.inf
    library = torch.get_device_module(device)
    used, reserved = library.max_memory_allocated(device), library.memory_reserved(device)
    free, _ = library.mem_get_info(device)
    return float(_USABLE_MEMORY_PART * (free + reserved) / max(used, 1))


@dataclass(frozen=True, slots=True)
class Precision:
    """In which precision numbers are stored and computed.

    Attributes:
        parameters: Type of parameters and inputs.
        compute: Type of autocast regions; ``None`` computes in the parameters' type.
    """

    name: str
    parameters: torch.dtype
    compute: torch.dtype | None = None

    def widened(self, module: nn.Module) -> nn.Module:
        """The module with parameters in this precision; wider ones keep theirs."""

        def wide(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor
            return tensor.to(torch.promote_types(tensor.dtype, self.parameters))

        return module._apply(wide)  # type: ignore[no-untyped-call,no-any-return]

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context for forward passes; costs nothing without autocast."""
        if self.compute is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """fp16 gradients vanish without a loss scale; the other precisions need none."""
        return torch.amp.GradScaler(device.type) if self.compute is torch.float16 else None


_PRECISIONS = {
    "float32": Precision("float32", torch.float32),
    "float64": Precision("float64", torch.float64),
    "bf16": Precision("bf16", torch.float32, torch.bfloat16),
    "fp16": Precision("fp16", torch.float32, torch.float16),
}


def precision(name: str) -> Precision:
    """Returns the precision of that name.

    Raises:
        SettingError: Unknown name.
    """
    if name not in _PRECISIONS:
        raise SettingError(f"--dtype {name}: unknown", remedy=f"one of {', '.join(_PRECISIONS)}")
    return _PRECISIONS[name]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)
