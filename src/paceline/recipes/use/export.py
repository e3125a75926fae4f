"""Write a trained model for other programs, without code: ``paceline export RUN``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline import train
from paceline.program import library
from paceline.recipes.argv import run_command
from paceline.recipes.language.adapters import without_future_warnings
from paceline.recipes.use import ExportOptions, Format
from paceline.recipes.use.evaluate import local_session, module_of
from paceline.recipes.use.onnx_file import mark
from paceline.spec import rundir
from paceline.spec.errors import DataError, SettingError
from paceline.spec.terminal import clean_line
from paceline.train import Batched, files


def export(options: ExportOptions) -> None:
    """Writes the model to a folder and prints its files."""
    module = module_of(options.run)
    generates = hasattr(module, "load_generator")
    form = options.format or ("transformers" if generates else "onnx")
    if form == "adapter" and not generates:
        raise SettingError(
            "--format adapter: this model has no adapters", remedy="--format onnx or torch"
        )
    if generates and form in ("transformers", "adapter"):
        folder = output_path(Path(options.run), f"export/{form}", options.to)
        write = partial(write_generator, module, options.run, form=form)
    else:
        model: PortableModel = module.portable(options.run)
        folder = output_path(model.folder, f"export/{form}", options.to)
        write = partial(write_portable, model, form=form)
    if options.to:
        require_no_model(folder)
    try:
        # Nothing is left if the model is refused; a file in place of a folder is refused here.
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        with tempfile.TemporaryDirectory(dir=existing, prefix=".export-") as temporary:
            write(Path(temporary))
            folder.mkdir(parents=True, exist_ok=True)
            paths = move_files(Path(temporary), folder, replaces=not options.to)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written", found=str(error), remedy="name another folder: --to"
        ) from None
    for path in paths:
        print(f"{clean_line(str(path))}  {path.stat().st_size:,} bytes")


def require_no_model(folder: Path) -> None:
    """Raises SettingError if a folder holds a model, or is the place of a run's own model."""
    require_absent(folder / name for name in ("config.json", "adapter_config.json"))
    path = folder.resolve()
    if path.name == rundir.MODEL and (path.parent / rundir.CONFIG).exists():
        raise SettingError(
            f"{folder} is for the model of the run {path.parent}", remedy="name another --to"
        )


def require_absent(paths: Iterable[Path]) -> None:
    """Raises SettingError if a path that --to would replace exists.

    An earlier export may be replaced no more than other files: it may be the base of a training.
    """
    if present := [path for path in paths if os.path.lexists(path)]:
        names = ", ".join(path.name for path in present[:5])
        raise SettingError(
            f"{present[0].parent} holds a model, or files that would be replaced",
            found=f"{names}, …" if present[5:] else names,
            remedy="name another --to, or remove the files if nothing needs them",
        )


def move_files(source: Path, folder: Path, *, replaces: bool) -> list[Path]:
    """Moves all files of a folder to another one on the same disk; returns their paths, in order.

    Raises:
        SettingError: There is a file of the same name, and ``replaces`` is not set.
    """
    names = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    if not replaces:
        require_absent(folder / name for name in names)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).replace(folder / name)
    return [folder / name for name in names]


def write_portable(model: PortableModel, folder: Path, form: Format) -> None:
    """Writes a model with inputs of a fixed form."""
    WRITERS[form](model, folder)
    write_metadata(model, folder, form)


def write_generator(module: Any, run: str, folder: Path, form: Format) -> None:
    """Writes a language model and its tokenizer in the formats of transformers and peft."""
    with local_session("cpu", train.load_config(Path(run))) as session:
        generator = module.load_generator(run, session)
        model, has_adapters = generator.model, hasattr(generator.model, "merge_and_unload")
        if form == "adapter" and not has_adapters:
            raise SettingError(
                "--format adapter: this model has no adapters", remedy="--format transformers"
            )
        with without_future_warnings():
            if form == "transformers" and has_adapters:
                model = model.merge_and_unload()
            model.save_pretrained(str(folder))
        generator.tokenizer.save_pretrained(str(folder))


def output_path(run: Path, name: str, to: str) -> Path:
    """Returns where a command writes: --to, or a path in the run directory.

    Raises:
        SettingError: Links there lead elsewhere. A run directory may come from a stranger.
    """
    if to:
        return Path(to).expanduser()
    path = run / name
    inside = [parent for parent in path.parents if parent.is_relative_to(run) and parent != run]
    entries = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
    if links := [place for place in (*inside, path, *entries) if place.is_symlink()]:
        raise SettingError(
            f"{path} is or holds a link, through which other files would be written",
            found="\n".join(f"{link} -> {link.readlink()}" for link in links[:5]),
            remedy="remove the links, or name another place: --to",
        )
    return path


def write_transformers(model: PortableModel, folder: Path) -> None:
    """Writes the format of transformers."""
    if model.hub is None:
        raise SettingError(
            "--format transformers: that library does not know this model",
            found=f"it is {model.config.get('model', 'one')} of the {model.config['task']} recipe"
            + (", with --add-layers" if model.config.get("network", {}).get("layers") else ""),
            remedy="--format onnx or torch",
        )
    model.hub.save_pretrained(str(folder))


def write_torch(model: PortableModel, folder: Path) -> None:
    """Writes a program of ``torch.export``."""
    with _exporting():
        program = torch.export.export(
            model.network, model.examples, dynamic_shapes=_dynamic_shapes(model), strict=False
        )
    with silence_exporters():
        torch.export.save(program, str(folder / "model.pt2"))


def to_onnx(model: PortableModel, path: Path) -> None:
    """Writes one ONNX file, weights included.

    Raises:
        SettingError: The library is missing.
        DataError: The network cannot be exported.
    """
    library("onnxscript", "ONNX files are written")
    with _exporting():
        torch.onnx.export(
            model.network,
            model.examples,
            str(path),
            input_names=list(model.names),
            output_names=["scores"],
            dynamic_shapes=_dynamic_shapes(model),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def write_onnx(model: PortableModel, path: Path) -> None:
    """Writes one ONNX file that names the weights that it was made from."""
    to_onnx(model, path)
    mark(path, model.config)


@contextlib.contextmanager
def silence_exporters() -> Iterator[None]:
    """Silences the exporters' messages about optional libraries."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    try:
        with silence_exporters():
            yield
    except Exception as error:  # torch's exporters raise many kinds
        raise DataError(
            "the network cannot be exported", found=f"{type(error).__name__}: {str(error)[:300]}"
        ) from error


def _dynamic_shapes(model: PortableModel) -> tuple[dict[int, Any], ...]:
    """Returns the dimensions whose size may differ from the examples."""
    auto = torch.export.Dim.DYNAMIC
    return tuple({0: auto, **dict.fromkeys(lengths, auto)} for lengths in model.lengths)


WRITERS: Mapping[str, Callable[[PortableModel, Path], None]] = {
    "transformers": write_transformers,
    "torch": write_torch,
    "onnx": lambda model, folder: write_onnx(model, folder / "model.onnx"),
}


def write_metadata(model: PortableModel, folder: Path, form: Format) -> None:
    """Writes the model's description and its tokenizer."""
    name = "paceline.json" if form == "transformers" else "config.json"
    files.write_json(folder / name, dict(model.config))
    source = model.folder / rundir.MODEL
    for path in source.glob("*token*.json"):
        if not path.is_symlink():
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


main = partial(run_command, export, ExportOptions, "paceline export")


Figures = tuple[int, dict[str, float]]
"""Number of samples, and metrics over them by name."""


@dataclass(frozen=True)
class PortableModel:
    """A network on the CPU, in float32 and in evaluation mode.

    Attributes:
        names: Names of its inputs.
        examples: Two samples of each input; the first dimension is the sample.
        lengths: Further dimensions of each input that may differ, by number.
        measure: Runs a network with these inputs as in use, for benchmarks.
        evaluate: Evaluates such a network on a number of held-out samples (0: all).
        calibrate: Yields batches of inputs from a number of training samples.
        figure: Main metric, and its value for a perfect network.
        static: Whether static quantization is the default.
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


def call_network(network: nn.Module, inputs: tuple[Tensor, ...]) -> object:
    """Calls a network."""
    return network(*inputs)


def library_model(config: Mapping[str, Any], network: nn.Module) -> Any:
    """Returns the library's model in a Hugging Face network, unless its head was extended."""
    return None if config["network"].get("layers") else getattr(network, "model", None)


CALIBRATION_BATCH = 32
"""Samples of a calibration batch."""


def spread_ids(count: int, limit: int) -> NDArray[np.int64]:
    """Returns ``limit`` numbers (0: all) evenly spread over ``count``."""
    size = min(limit, count) if limit else count
    return np.arange(size, dtype=np.int64) * count // size


def batches(data: Batched, limit: int) -> Iterator[tuple[Tensor, ...]]:
    """Yields batches of ``limit`` samples of a data set (0: all), without augmentation."""
    ids, finish = spread_ids(len(data), limit), getattr(data, "on_device", None)
    for start in range(0, len(ids), CALIBRATION_BATCH):
        batch = data.batch(ids[start : start + CALIBRATION_BATCH], None)
        yield finish(batch, None) if finish else batch


if __name__ == "__main__":
    sys.exit(main())
