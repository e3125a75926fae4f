"""Precision: of the parameters, of the computation, and the loss scale of fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.spec.errors import SettingError

NAMES = ("float32", "float64", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Precision:
    """How numbers are kept and computed.

    Attributes:
        name: As the user writes it.
        parameters: Format of parameters and inputs.
        compute: Format of autocast regions; ``None`` computes in the parameters' format.
    """

    name: str
    parameters: torch.dtype
    compute: torch.dtype | None = None

    def widened(self, module: nn.Module) -> nn.Module:
        """The module with parameters in this format; wider ones keep theirs."""

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
        """fp16 gradients vanish without a loss scale; the other formats need none."""
        return torch.amp.GradScaler(device.type) if self.compute is torch.float16 else None


_ALL = {
    "float32": Precision("float32", torch.float32),
    "float64": Precision("float64", torch.float64),
    "bf16": Precision("bf16", torch.float32, torch.bfloat16),
    "fp16": Precision("fp16", torch.float32, torch.float16),
}


def precision(name: str) -> Precision:
    """The precision of that name.

    Raises:
        SettingError: Unknown name.
    """
    if name not in _ALL:
        raise SettingError(f"--dtype {name}: unknown", remedy=f"one of {', '.join(NAMES)}")
    return _ALL[name]
