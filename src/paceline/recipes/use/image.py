"""Evaluation of and prediction with trained image models."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline import train
from paceline.recipes.data.decoding import (
    MAX_PIXELS,
    SUFFIXES,
    decode_resized,
    describe_unread_files,
    image_files,
    unread_files,
    unreadable_error,
)
from paceline.recipes.data.images import Joined, Subset, load
from paceline.recipes.image import evaluate
from paceline.recipes.networks import build_image_network
from paceline.recipes.options import ImageOptions
from paceline.recipes.preprocessing import ImageTensors, Normalisation, fitted
from paceline.recipes.use import EvaluateOptions, PredictOptions
from paceline.recipes.use.evaluate import (
    Measured,
    TrainedModel,
    description_schema,
    local_session,
    model_config,
    run_evaluation,
    undivided,
)
from paceline.recipes.use.export import (
    Figures,
    PortableModel,
    batches,
    call_network,
    library_model,
    spread_ids,
)
from paceline.recipes.use.predict import Prediction
from paceline.spec.errors import DataError
from paceline.spec.schema import boolean, integer, list_of, number, record, text, tuple_of

_MAX_CHANNELS = 4
NAMES = ("images",)
"""Names of the network's inputs."""
_SHAPE = tuple_of(*[integer(1)] * 3)
_DESCRIPTION = description_schema(
    {"skip_damaged": boolean, "folder": text()},
    shape=_SHAPE,
    decoded=_SHAPE,
    crop=boolean,
    channels_last=boolean,
    classes=list_of(text()),
    normalisation=record(mean=list_of(number), deviation=list_of(number)),
)


@dataclass(frozen=True)
class TrainedImageModel(TrainedModel):
    """A trained image model.

    Attributes:
        shape: (channels, height, width) of an image.
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    normalise: Normalisation

    def network(self) -> nn.Module:
        network = build_image_network(self.config["network"], self.shape, len(self.classes))
        if self.config["channels_last"]:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network

    @property
    def size(self) -> int:
        """Size to which decoded images are cropped or enlarged (0: unchanged)."""
        return self.shape[1] if list(self.shape) != self.config["decoded"] else 0

    def data_options(self, options: EvaluateOptions) -> ImageOptions:
        """Returns the options that read the training's data, or others in the same way."""
        recorded = self.config["data"]
        split, folder = recorded["split"], recorded.get("folder", "")
        trained_folder = folder if not options.data and Path(folder).is_dir() else ""
        return ImageOptions(
            data=options.data or recorded["source"],
            data_dir=options.data_dir or trained_folder,
            image_size=self.config["decoded"][1],
            test_fraction=split.get("test_fraction", 0.2),
            val_fraction=split.get("val_fraction", 0.0),
            seed=split.get("seed", 0),
            augment=("resized-crop",) if self.config["crop"] else (),
            skip_damaged=recorded["skip_damaged"],
            data_config="" if options.data else recorded["config"],
        )


def load_trained(run: str) -> TrainedImageModel:
    """Loads the description of a run's image model."""
    with model_config(run, "image", _DESCRIPTION) as config:
        channels, height, width = config["shape"]
        for depth, rows, columns in (config["shape"], config["decoded"]):
            if not (0 < depth <= _MAX_CHANNELS and 0 < rows * columns <= MAX_PIXELS):
                raise ValueError(f"images of {depth} × {rows} × {columns} values")
        mean, deviation = (
            tuple(map(float, config["normalisation"][name])) for name in ("mean", "deviation")
        )
        if not (
            0 < len(mean) == len(deviation) and min(deviation) > 0 and all(map(isfinite, mean))
        ):
            raise ValueError(f"images of mean {mean} and deviation {deviation}")
        normalise = Normalisation(mean, deviation)
        shape, classes = (channels, height, width), tuple(config["classes"])
        return TrainedImageModel(Path(run), config, shape, classes, normalise)


def evaluate_run(options: EvaluateOptions) -> None:
    """Runs one evaluation; called on every rank."""
    model = load_trained(options.run)
    data = undivided(options, model, load(model.data_options(options)), Joined)
    check_compatible(model, data.source, data.shape, data.classes)

    def measure(session: train.Session, network: nn.Module, split: str) -> Measured:
        numbers = session.precision.parameters
        images = ImageTensors(data.splits[split], model.normalise, numbers, (), model.size)
        result = evaluate(session, network, images)
        hits = round(result.sums["accuracy"])
        summary = f"accuracy {result['accuracy']:.4f} ({hits} of {result.count} {split} images)"
        return result.count, result.values(), summary

    run_evaluation(options, model, data, measure)


def portable(run: str) -> PortableModel:
    """Loads the network for export, benchmarks and quantization."""
    model = load_trained(run)
    network = model.load_float32().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    channels, height, width = model.shape
    examples = (torch.rand(2, channels, height, width),)

    data = functools.cache(lambda: load(model.data_options(EvaluateOptions())))

    def pictures(part: str, limit: int = 0) -> ImageTensors:
        split = data().splits[part]
        subset = Subset(split, spread_ids(len(split.labels), limit))
        return ImageTensors(subset, model.normalise, torch.float32, (), model.size)

    def evaluated(candidate: nn.Module, limit: int) -> Figures:
        with train.join(device="cpu", quiet=True) as session:
            result = evaluate(session, candidate, pictures(data().held_out, limit))
        return result.count, result.values()

    def calibrated(limit: int) -> Iterator[tuple[Tensor, ...]]:
        return (batch[:1] for batch in batches(pictures("train"), limit))

    return PortableModel(
        model.folder,
        model.config,
        network,
        NAMES,
        examples,
        ({},),
        call_network,
        evaluated,
        calibrated,
        static=True,
        hub=library_model(model.config, network),
    )


def check_compatible(
    model: TrainedImageModel, source: str, shape: tuple[int, int, int], classes: tuple[str, ...]
) -> None:
    """Raises DataError for data of another shape or with other classes than the model's."""
    if list(shape) != model.config["decoded"] or classes != model.classes:
        raise DataError(
            f"{source} does not fit the model",
            found=f"data: {shape}, {len(classes)} classes;"
            f" model: {tuple(model.config['decoded'])}, {len(model.classes)} classes",
        )


def predictions(options: PredictOptions) -> Iterator[Prediction]:
    """Predicts the class of each image file, and of all images in folders."""
    model = load_trained(options.run)
    with local_session(options.device, model.config) as session:
        network = model.load_or_open(session, options.onnx, NAMES)
        for path in _files(options.inputs):
            try:
                chances = probabilities(session, model, network, path)
            except DataError as error:
                yield Prediction(str(path), None, model.classes, error)
            else:
                yield Prediction(str(path), chances, model.classes)


def _files(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        path = Path(name)
        if not path.is_dir():
            yield path
            continue
        images = image_files(path)
        unread = describe_unread_files(unread_files(path, images))
        if not images:
            raise DataError(
                f"{path} holds no images", found=unread, remedy=", ".join(sorted(SUFFIXES))
            )
        if unread:
            print(
                f"paceline: {unread}, left out: not named like an image",
                file=sys.stderr,
                flush=True,
            )
        yield from images


@torch.inference_mode()
def probabilities(
    session: train.Session, model: TrainedImageModel, network: nn.Module, image: Path
) -> Tensor:
    """Returns the probability of each class, float32, shape ``[classes]``."""
    channels, height, width = model.config["decoded"]
    try:
        pixels = decode_resized(image, channels, (width, height), model.config["crop"])
    except Exception as error:  # a damaged image may raise anything
        remedy = "name image files, or folders of images"
        raise unreadable_error(image, error, remedy) from None
    inputs = model.normalise(pixels[None], session.precision.parameters, session.device)
    with session.autocast():
        outputs: Tensor = network(fitted(inputs, model.size))
    return outputs[0].float().softmax(0).cpu()
