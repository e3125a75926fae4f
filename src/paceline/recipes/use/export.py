"""Write a trained model for other programs: ``paceline export RUN``.

Nothing that is written runs code when it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.program import guarded, library
from paceline.recipes import use_of
from paceline.recipes.argv import parse
from paceline.recipes.use import ExportOptions, Format
from paceline.recipes.use.evaluate import task_of
from paceline.spec import rundir
from paceline.spec.errors import DataError, SettingError
from paceline.train import Batched, files


def export(options: ExportOptions) -> None:
    """Writes the folder and says what is in it."""
    model: Portable = use_of(task_of(options.run)).portable(options.run)
    folder = Path(options.to or model.folder / "export" / options.format).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        WRITERS[options.format](model, folder)
        beside(model, folder, options.format)
    except OSError as error:
        raise DataError(f"{folder} cannot be written", found=str(error)) from None
    for path in sorted(folder.iterdir()):
        print(f"{path}  {path.stat().st_size:,} bytes")


def write_transformers(model: Portable, folder: Path) -> None:
    """In the library's own form."""
    if model.hub is None:
        raise SettingError(
            "--format transformers: that library does not know this model",
            found=f"it is {model.config.get('model', 'one')} of the {model.config['task']} recipe"
            + (", with --add-layers" if model.config.get("network", {}).get("layers") else ""),
            remedy="--format onnx or torch",
        )
    model.hub.save_pretrained(str(folder))


def write_torch(model: Portable, folder: Path) -> None:
    """A program of ``torch.export``; only its graph and tensors are loaded."""
    with quietly():
        program = _exported(
            lambda: torch.export.export(
                model.network, model.examples, dynamic_shapes=_free(model), strict=False
            )
        )
        torch.export.save(program, str(folder / "model.pt2"))


def write_onnx(model: Portable, folder: Path) -> None:
    """An ONNX file."""
    to_onnx(model, folder / "model.onnx")


def to_onnx(model: Portable, path: Path) -> None:
    """Writes one ONNX file, weights included.

    Raises:
        SettingError: The library is missing.
        DataError: The network cannot be exported.
    """
    library("onnxscript", "ONNX files are written")

    def write() -> None:
        torch.onnx.export(
            model.network,
            model.examples,
            str(path),
            input_names=list(model.names),
            output_names=["scores"],
            dynamic_shapes=_free(model),
            dynamo=True,
            external_data=False,
            verbose=False,
        )

    with quietly():
        _exported(write)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keeps back what exporters say of libraries that are not needed here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _exported(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:  # torch's exporters raise many kinds
        raise DataError(
            "the network cannot be exported",
            found=f"{type(error).__name__}: {str(error)[:300]}",
        ) from error


def _free(model: Portable) -> tuple[dict[int, Any], ...]:
    """Which dimensions may have another size than in the examples."""
    auto = torch.export.Dim.DYNAMIC
    return tuple({0: auto, **dict.fromkeys(lengths, auto)} for lengths in model.lengths)


WRITERS: Mapping[Format, Callable[[Portable, Path], None]] = {
    "transformers": write_transformers,
    "torch": write_torch,
    "onnx": write_onnx,
}


def beside(model: Portable, folder: Path, form: Format) -> None:
    """What one needs besides the network: its description, and tokenizer files."""
    name = "paceline.json" if form == "transformers" else "config.json"
    files.write_json(folder / name, dict(model.config))
    source = model.folder / rundir.MODEL
    for path in source.glob("*token*.json"):
        shutil.copyfile(path, folder / path.name)
    if form == "transformers" and "normalisation" in model.config:
        (folder / "preprocessor_config.json").write_text(json.dumps(_preprocessing(model.config)))


def _preprocessing(config: Mapping[str, Any]) -> dict[str, Any]:
    _, height, width = config["shape"]
    moments = config["normalisation"]
    return {
        "size": {"height": height, "width": width},
        "image_mean": moments["mean"],
        "image_std": moments["deviation"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the export in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: export(parse(ExportOptions, flags, "paceline export")))


Figures = tuple[int, dict[str, float]]
"""Samples, and each figure over them."""


@dataclass(frozen=True)
class Portable:
    """A network on the CPU, in float32 and in evaluation mode.

    Attributes:
        folder: The run directory.
        config: The description of the model.
        network: Takes the inputs.
        names: Of the inputs.
        examples: Two samples of each input; the first dimension is the sample.
        lengths: For each input the dimensions, besides the first, that may differ, by number.
        measure: Runs a network with the same inputs as it is used, on inputs like the examples.
        evaluate: Figures of such a network on so many held-out samples (0: all).
        calibrate: Batches of inputs, of so many training samples.
        figure: The one that counts, and its value for a perfect network.
        static: Activations are better quantized by ranges that are measured before.
        hub: The library's model inside, for one of Hugging Face.
    """

    folder: Path
    config: Mapping[str, Any]
    network: nn.Module
    names: tuple[str, ...]
    examples: tuple[Tensor, ...]
    lengths: tuple[Mapping[int, str], ...]
    measure: Callable[[nn.Module, tuple[Tensor, ...]], object]
    evaluate: Callable[[nn.Module, int], Figures]
    calibrate: Callable[[int], Iterator[tuple[Tensor, ...]]]
    figure: tuple[str, float] = ("accuracy", 1.0)
    static: bool = False
    hub: Any = None


def plain(network: nn.Module, inputs: tuple[Tensor, ...]) -> object:
    """Runs a network that is used by calling it."""
    return network(*inputs)


def hub_model(config: Mapping[str, Any], network: nn.Module) -> Any:
    """The library's model in a network of Hugging Face, unless its head has layers of ours."""
    return None if config["network"].get("layers") else getattr(network, "model", None)


TOGETHER = 32
"""Samples of a batch for calibration."""


def spread(count: int, most: int) -> NDArray[np.int64]:
    """Numbers of ``most`` samples (0: all) of ``count``, evenly spread over them."""
    taken = min(most, count) if most else count
    return np.arange(taken, dtype=np.int64) * count // taken


def batches(data: Batched, most: int) -> Iterator[tuple[Tensor, ...]]:
    """What a data set makes of so many of its samples, without augmentation."""
    ids, finish = spread(len(data), most), getattr(data, "on_device", None)
    for start in range(0, len(ids), TOGETHER):
        made = data.batch(ids[start : start + TOGETHER], None)
        yield finish(made, None) if finish else made


if __name__ == "__main__":
    sys.exit(main())
