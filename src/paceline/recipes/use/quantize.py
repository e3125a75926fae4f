"""Quantize a trained model to 8 bits with ONNX Runtime: ``paceline quantize RUN``.

Activations are quantized with ranges measured at run time (dynamic) or on training data (static).
The result is evaluated on the held-out data before it is written.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from paceline.recipes.argv import check_at_least, check_fraction, run_command
from paceline.recipes.use import QuantizeOptions
from paceline.recipes.use.evaluate import module_of
from paceline.recipes.use.export import (
    PortableModel,
    output_path,
    require_absent,
    silence_exporters,
    write_onnx,
)
from paceline.recipes.use.onnx_file import OnnxNetwork, runtime
from paceline.spec.errors import DataError
from paceline.train import files


def quantize(options: QuantizeOptions) -> None:
    """Writes the quantized model, unless it loses too much accuracy."""
    check_fraction("--max-drop", options.max_drop)
    check_at_least("--calibration", options.calibration, 1)
    check_at_least("--samples", options.samples, 0)
    model: PortableModel = module_of(options.run).portable(options.run)
    static = model.static if options.approach == "auto" else options.approach == "static"
    target = output_path(model.folder, "quantized/model.onnx", options.to)
    if options.to:
        require_absent([target])
    with tempfile.TemporaryDirectory() as temporary:
        full, small = Path(temporary) / "whole.onnx", Path(temporary) / "small.onnx"
        write_onnx(model, full)
        exported_bytes = full.stat().st_size
        prepare(full)
        if static:
            write_static(full, small, model, options.calibration)
        else:
            write_dynamic(full, small)
        samples, baseline = model.evaluate(model.network, options.samples)
        _, quantized = model.evaluate(OnnxNetwork(small, model.names), options.samples)
        name, perfect = model.figure
        check_drop(name, baseline[name], quantized[name], options.max_drop, perfect)
        try:
            files.write_bytes(target, small.read_bytes())
        except OSError as error:
            raise DataError(f"{target} cannot be written", found=str(error)) from None
    num_bytes = target.stat().st_size
    share = f"{num_bytes / exported_bytes:.0%} of the {exported_bytes:,}"
    print(f"{target}  {num_bytes:,} bytes ({share} that paceline export writes)")
    print(f"{name} {baseline[name]:.4f} → {quantized[name]:.4f} ({samples} samples)")


def prepare(model_file: Path) -> None:
    """Runs the library's preprocessing, which quantization needs for the exporter's shapes."""
    tools = runtime("onnxruntime.quantization", "models are quantized")
    with silence_exporters():
        try:
            tools.shape_inference.quant_pre_process(str(model_file), str(model_file))
        except AssertionError:  # it does not support all symbolic shapes of torch
            tools.shape_inference.quant_pre_process(
                str(model_file), str(model_file), skip_symbolic_shape=True
            )


def write_dynamic(full: Path, small: Path) -> None:
    """Quantizes the weights of an ONNX file."""
    tools = runtime("onnxruntime.quantization", "models are quantized")
    with silence_exporters():
        tools.quantize_dynamic(str(full), str(small), weight_type=tools.QuantType.QInt8)


def write_static(full: Path, small: Path, model: PortableModel, samples: int) -> None:
    """Quantizes weights, and activations by their ranges on training data."""
    tools = runtime("onnxruntime.quantization", "models are quantized")
    batches = ({n: t.numpy() for n, t in zip(model.names, tensors, strict=True)}
             for tensors in model.calibrate(samples))  # fmt: skip

    class Reader(tools.CalibrationDataReader):  # type: ignore[misc,name-defined]
        def get_next(self) -> dict[str, Any] | None:
            return next(batches, None)

    int8 = {"activation_type": tools.QuantType.QInt8, "weight_type": tools.QuantType.QInt8}
    with silence_exporters():
        tools.quantize_static(str(full), str(small), Reader(), per_channel=True, **int8)


def check_drop(name: str, before: float, after: float, limit: float, perfect: float = 1.0) -> None:
    """Raises DataError if a metric drops by more than ``limit``, a fraction of ``perfect``."""
    drop = (before - after) / perfect
    if drop > limit:
        raise DataError(
            f"quantizing costs more {name} than --max-drop {limit}: nothing was written",
            found=f"{name} {before:.4f} before, {after:.4f} after",
            remedy=f"--max-drop {drop + 0.001:.3f}, or keep the model as it is",
        )


main = partial(run_command, quantize, QuantizeOptions, "paceline quantize")


if __name__ == "__main__":
    sys.exit(main())
