"""Make a trained model smaller: ``paceline quantize RUN``.

Weights are kept in 8 bits; activations are brought to 8 bits as they come (dynamic), or by ranges
that are measured on training data before (static), by ONNX Runtime, on the CPU. The result is
evaluated on the held-out data before it is kept.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.program import guarded
from paceline.recipes import use_of
from paceline.recipes.argv import at_least, below_one, parse
from paceline.recipes.use import QuantizeOptions
from paceline.recipes.use.evaluate import task_of
from paceline.recipes.use.export import Portable, quietly, to_onnx
from paceline.recipes.use.onnx_file import OnnxNetwork, runtime
from paceline.spec.errors import DataError
from paceline.train import files


def quantize(options: QuantizeOptions) -> None:
    """Writes the smaller model, or refuses."""
    below_one("--max-drop", options.max_drop)
    at_least("--calibration", options.calibration, 1)
    at_least("--samples", options.samples, 0)
    model: Portable = use_of(task_of(options.run)).portable(options.run)
    static = model.static if options.approach == "auto" else options.approach == "static"
    target = Path(options.to or model.folder / "quantized/model.onnx").expanduser()
    with tempfile.TemporaryDirectory() as temporary:
        whole, small = Path(temporary) / "whole.onnx", Path(temporary) / "small.onnx"
        to_onnx(model, whole)
        prepare(whole)
        if static:
            write_static(whole, small, model, options.calibration)
        else:
            write_dynamic(whole, small)
        samples, before = model.evaluate(model.network, options.samples)
        _, after = model.evaluate(OnnxNetwork(small, model.names), options.samples)
        name, perfect = model.figure
        check_drop(name, before[name], after[name], options.max_drop, perfect)
        sizes = whole.stat().st_size, small.stat().st_size
        try:
            files.write_bytes(target, small.read_bytes())
        except OSError as error:
            raise DataError(f"{target} cannot be written", found=str(error)) from None
    print(f"{target}  {sizes[1]:,} bytes ({sizes[1] / sizes[0]:.0%} of {sizes[0]:,})")
    print(f"{name} {before[name]:.4f} → {after[name]:.4f} ({samples} samples)")


def prepare(whole: Path) -> None:
    """The library's own optimisation; without it it stumbles over shapes of the exporter."""
    tools = runtime("onnxruntime.quantization", "models are quantized")
    with quietly():
        try:
            tools.shape_inference.quant_pre_process(str(whole), str(whole))
        except AssertionError:  # of its symbolic shapes: it cannot follow all that torch exports
            tools.shape_inference.quant_pre_process(
                str(whole), str(whole), skip_symbolic_shape=True
            )


def write_dynamic(whole: Path, small: Path) -> None:
    """Quantizes the weights of an ONNX file."""
    tools = runtime("onnxruntime.quantization", "models are quantized")
    with quietly():
        tools.quantize_dynamic(str(whole), str(small), weight_type=tools.QuantType.QInt8)


def write_static(whole: Path, small: Path, model: Portable, samples: int) -> None:
    """Quantizes weights and activations, these by their ranges on training data."""
    tools = runtime("onnxruntime.quantization", "models are quantized")
    given = ({n: t.numpy() for n, t in zip(model.names, one, strict=True)}
             for one in model.calibrate(samples))  # fmt: skip

    class Reader(tools.CalibrationDataReader):  # type: ignore[misc,name-defined]
        def get_next(self) -> dict[str, Any] | None:
            return next(given, None)

    int8 = {"activation_type": tools.QuantType.QInt8, "weight_type": tools.QuantType.QInt8}
    with quietly():
        tools.quantize_static(str(whole), str(small), Reader(), per_channel=True, **int8)


def check_drop(name: str, before: float, after: float, limit: float, perfect: float = 1.0) -> None:
    """Refuses a loss beyond the limit.

    Args:
        name: Of the figure.
        before, after: Its values.
        limit: Largest loss, as a part of ``perfect``.
        perfect: Its value for a perfect network.

    Raises:
        DataError: Names both figures.
    """
    drop = (before - after) / perfect
    if drop > limit:
        raise DataError(
            f"quantizing costs more {name} than --max-drop {limit}: nothing was written",
            found=f"{name} {before:.4f} before, {after:.4f} after",
            remedy=f"--max-drop {drop + 0.001:.3f}, or keep the model as it is",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the quantization in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: quantize(parse(QuantizeOptions, flags, "paceline quantize")))


if __name__ == "__main__":
    sys.exit(main())
