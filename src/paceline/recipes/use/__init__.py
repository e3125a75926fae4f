"""Options of the commands that use trained models. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.recipes.options import Backend, Device


@dataclass(frozen=True)
class EvaluateOptions:
    """Evaluate a trained model on its held-out data, or on others."""

    run: str = ""
    """Run directory that holds model/."""
    split: str = ""
    """train, val or test (default: the part that the training reported)."""
    data: str = ""
    """Other data than the model was trained on: a name or a folder."""
    target: str = ""
    """The other file of a corpus of two files, beside --data."""
    data_dir: str = ""
    """Folder that holds the files of the named data set (default: the usual places)."""
    device: Device = "auto"
    """Where to compute."""
    backend: Backend = "auto"
    """Communication backend."""
    json: str = ""
    """File to which the figures are also written, as JSON."""


@dataclass(frozen=True)
class PredictOptions:
    """Tell the class of images or texts."""

    inputs: tuple[str, ...] = field(default=(), metadata={"positional": True})
    """Image files and folders of images; or texts, and csv, tsv and txt files of texts."""
    run: str = ""
    """Run directory that holds model/."""
    top_k: int = 3
    """Classes shown for each input."""
    json: bool = False
    """One JSON object a line."""
    onnx: str = ""
    """An ONNX file that export or quantize wrote, to be used instead of the run's own weights."""
    device: Device = "auto"
    """Where to compute."""


@dataclass(frozen=True)
class TranslateOptions:
    """Translate sentences; without any, the lines of standard input."""

    sentences: tuple[str, ...] = field(default=(), metadata={"positional": True})
    """Sentences."""
    run: str = ""
    """Run directory that holds model/."""
    beam: int = 0
    """Beams of the search (0: as in the training; 1: greedy)."""
    onnx: str = ""
    """An ONNX file that export or quantize wrote, to be used instead of the run's own weights;
    greedy."""
    attention: str = ""
    """File for a picture of the first sentence's attention (PNG)."""
    device: Device = "auto"
    """Where to compute."""


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
    onnx: str = ""
    """An ONNX file that export or quantize wrote, to be used instead of the run's own weights."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class QuantizeOptions:
    """Make a trained model smaller: weights and activations in 8 bits, for CPUs."""

    run: str = ""
    """Run directory that holds model/."""
    to: str = ""
    """ONNX file to be written (default: quantized/model.onnx in the run directory)."""
    approach: Literal["auto", "static", "dynamic"] = "auto"
    """How activations come to 8 bits: by ranges that are measured before on training data, or as
    they come (auto: static for images, dynamic for texts and translations)."""
    calibration: int = 128
    """Training samples on which static measures the ranges."""
    max_drop: float = 0.01
    """Largest accepted loss of accuracy on the held-out data, or of BLEU (0.01 is one point);
    beyond it nothing is written."""
    samples: int = 0
    """Held-out samples on which that is measured (0: all)."""
