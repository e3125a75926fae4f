"""Make a trained model smaller: ``paceline quantize RUN``.

Weights are kept in 8 bits, activations are brought to 8 bits as they come (dynamic quantization
of ONNX Runtime, on the CPU). The result is evaluated on the held-out data before it is kept.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.recipes import use_of
from paceline.recipes.argv import below_one, parse
from paceline.recipes.program import guarded, library
from paceline.recipes.use import QuantizeOptions
from paceline.recipes.use.evaluate import task_of
from paceline.recipes.use.export import Portable, quietly, to_onnx
from paceline.spec.errors import DataError, SettingError
from paceline.train import files


class OnnxNetwork(nn.Module):
    """An ONNX file as a network."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__()
        runtime = _runtime("onnxruntime", "quantized models are run")
        self._session: Any = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self._names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        """The scores that the file's network gives."""
        given = zip(self._names, inputs, strict=True)
        feed = {name: one.contiguous().numpy() for name, one in given}
        return torch.from_numpy(self._session.run(None, feed)[0])


def quantize(options: QuantizeOptions) -> None:
    """Writes the smaller model, or refuses."""
    below_one("--max-drop", options.max_drop)
    model: Portable = use_of(task_of(options.run)).portable(options.run)
    if model.evaluate is None:
        raise SettingError(
            f"models of the {model.config['task']} recipe cannot be quantized",
            remedy="paceline export writes them as they are",
        )
    target = Path(options.to or model.folder / "quantized/model.onnx").expanduser()
    with tempfile.TemporaryDirectory() as temporary:
        whole, small = Path(temporary) / "whole.onnx", Path(temporary) / "small.onnx"
        to_onnx(model, whole)
        write_int8(whole, small)
        samples, before = model.evaluate(model.network)
        _, after = model.evaluate(OnnxNetwork(small, model.names))
        check_drop(before["accuracy"], after["accuracy"], options.max_drop)
        sizes = whole.stat().st_size, small.stat().st_size
        try:
            files.write_bytes(target, small.read_bytes())
        except OSError as error:
            raise DataError(f"{target} cannot be written", found=str(error)) from None
    print(f"{target}  {sizes[1]:,} bytes ({sizes[1] / sizes[0]:.0%} of {sizes[0]:,})")
    print(f"accuracy {before['accuracy']:.4f} → {after['accuracy']:.4f} ({samples} samples)")


def write_int8(whole: Path, small: Path) -> None:
    """Quantizes the weights of an ONNX file."""
    tools = _runtime("onnxruntime.quantization", "models are quantized")
    with quietly():
        # Without its own optimisation first it stumbles over shapes that the exporter wrote.
        tools.shape_inference.quant_pre_process(str(whole), str(whole))
        tools.quantize_dynamic(str(whole), str(small), weight_type=tools.QuantType.QInt8)


def _runtime(name: str, purpose: str) -> Any:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it would keep and send records of use
    return library(name, purpose)


def check_drop(before: float, after: float, limit: float) -> None:
    """Refuses a loss of accuracy beyond the limit.

    Raises:
        DataError: Names both figures.
    """
    if before - after > limit:
        raise DataError(
            f"quantizing costs more accuracy than --max-drop {limit}: nothing was written",
            found=f"accuracy {before:.4f} before, {after:.4f} after",
            remedy=f"--max-drop {before - after + 0.001:.3f}, or keep the model as it is",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the quantization in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: quantize(parse(QuantizeOptions, flags, "paceline quantize")))


if __name__ == "__main__":
    sys.exit(main())
