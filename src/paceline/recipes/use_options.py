"""Settings of exporting, measuring and quantizing. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["transformers", "torch", "onnx"]


@dataclass(frozen=True)
class ExportOptions:
    """Write a trained model for other programs."""

    run: str = ""
    """Run directory that holds model/."""
    to: str = ""
    """Folder to be written (default: export in the run directory)."""
    format: Format = "onnx"
    """transformers: safetensors and config.json of that library (its own models only);
    torch: a torch.export program (.pt2); onnx: ONNX."""


@dataclass(frozen=True)
class BenchmarkOptions:
    """Measure latency and throughput of a trained model."""

    run: str = ""
    """Run directory that holds model/."""
    batch: tuple[int, ...] = (1, 8, 32)
    """Samples at once; each is measured."""
    iterations: int = 30
    """Timed calls for each batch."""
    warm_up: int = 5
    """Calls before them."""
    threads: int = 0
    """Threads of the CPU (0: torch's choice)."""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """Where to compute."""
    dtype: Literal["", "float32", "bf16", "fp16"] = ""
    """Precision (default: that of the training)."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class QuantizeOptions:
    """Make a trained model smaller: weights in 8 bits, activations as they come (CPU)."""

    run: str = ""
    """Run directory that holds model/."""
    to: str = ""
    """ONNX file to be written (default: quantized/model.onnx in the run directory)."""
    max_drop: float = 0.01
    """Largest accepted loss of accuracy on the held-out data; beyond it nothing is written."""
