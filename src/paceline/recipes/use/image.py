"""A trained image model: read from its run directory without running code, evaluated, used."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import train
from paceline.recipes.data.images import Part, Request, load
from paceline.recipes.data.photos import SUFFIXES, decode, image_files
from paceline.recipes.image import evaluate
from paceline.recipes.networks import rebuilt_images
from paceline.recipes.pictures import Normalisation, Pictures, fitted
from paceline.recipes.use import EvaluateOptions, PredictOptions
from paceline.recipes.use.evaluate import alone, check_unchanged, choose_split, joined, report
from paceline.recipes.use.export import Figures, Portable, batches, hub_model, plain, spread
from paceline.recipes.use.onnx_file import OnnxNetwork
from paceline.recipes.use.predict import Guess
from paceline.spec.errors import DataError, SettingError
from paceline.train import load_config, load_weights

NAMES = ("images",)
"""Of the network's inputs."""


@dataclass(frozen=True)
class Trained:
    """A model as described by ``model/config.json``.

    Attributes:
        folder: The run directory.
        config: The whole description.
        shape: (channels, height, width) of an image.
        classes: Name of each class.
        normalise: How pixels become numbers.
    """

    folder: Path
    config: dict[str, Any]
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    normalise: Normalisation

    def network(self) -> nn.Module:
        """A new network of this shape, with initial weights."""
        network = rebuilt_images(self.config["network"], self.shape, len(self.classes))
        if self.config["channels_last"]:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network

    @property
    def size(self) -> int:
        """To what decoded images are cut or enlarged (0: they are used as they are)."""
        return self.shape[1] if list(self.shape) != self.config["decoded"] else 0

    def load(self, network: nn.Module) -> None:
        """Loads the trained weights into a network that is already in its place."""
        load_weights(self.folder, network)

    def folder_of(self, options: EvaluateOptions) -> str:
        """Where to look for the files of a named set first: where the training did, as a rule."""
        recorded = self.config["data"].get("folder", "")
        known = recorded if not options.data and Path(recorded).is_dir() else ""
        return options.data_dir or known

    def request(self, data: str = "") -> Request:
        """How to read the data set that it was trained on, or another one in the same way."""
        recorded = self.config["data"]
        split = recorded["split"]
        return Request(
            data or recorded["source"],
            image_size=self.config["decoded"][1],
            test_fraction=split.get("test_fraction", 0.2),
            val_fraction=split.get("val_fraction", 0.0),
            seed=split.get("seed", 0),
            crop=self.config["crop"],
            skip_damaged=recorded["skip_damaged"],
            config="" if data else recorded["config"],
        )


def trained(run: str) -> Trained:
    """The image model of a run.

    Raises:
        SettingError: No run was named.
        DataError: There is no model, or none of an image recipe.
    """
    if not run:
        raise SettingError("--run is missing", remedy="--run runs/image-…")
    folder = Path(run)
    config = load_config(folder)
    try:
        if config["task"] != "image":
            raise ValueError(f"its model was trained by the recipe {config['task'] or '(unnamed)'}")
        channels, height, width = config["shape"]
        moments = config["normalisation"]
        normalise = Normalisation(tuple(moments["mean"]), tuple(moments["deviation"]))
        return Trained(
            folder, config, (channels, height, width), tuple(config["classes"]), normalise
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder} holds no model of the image recipe",
            found=f"model/config.json: {type(error).__name__} {error}",
        ) from None


def evaluate_run(options: EvaluateOptions) -> None:
    """One evaluation, on every rank."""
    model = trained(options.run)
    data = load(model.folder_of(options), model.request(options.data))
    check_fits(model, data.source, data.shape, data.classes)
    check_unchanged(data.source, data.fingerprint, model.config, options)
    split = choose_split(data.splits, options.split, data.held_out)
    with joined(options, model.config) as session:
        session.agree("the data set", data.fingerprint)
        network = session.place(model.network())
        model.load(network)
        numbers = session.precision.parameters
        images = Pictures(data.splits[split], model.normalise, numbers, (), model.size)
        result = evaluate(session, network, images)
        report(session, options, split, result.count, result.values())
        hits = round(result.sums["accuracy"])
        session.say(f"accuracy {result['accuracy']:.4f} ({hits} of {result.count} {split} images)")


def portable(run: str) -> Portable:
    """The network for other uses."""
    model = trained(run)
    network = model.network().eval()
    model.load(network)
    network = network.float().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    channels, height, width = model.shape
    examples = (torch.rand(2, channels, height, width),)

    data = functools.cache(lambda: load(model.folder_of(EvaluateOptions()), model.request()))

    def pictures(part: str, most: int = 0) -> Pictures:
        split = data().splits[part]
        some = Part(split, spread(len(split.labels), most))
        return Pictures(some, model.normalise, torch.float32, (), model.size)

    def evaluated(other: nn.Module, most: int) -> Figures:
        with train.join(device="cpu", quiet=True) as session:
            result = evaluate(session, other, pictures(data().held_out, most))
        return result.count, result.values()

    def calibrated(most: int) -> Iterator[tuple[Tensor, ...]]:
        return (one[:1] for one in batches(pictures("train"), most))

    return Portable(
        model.folder,
        model.config,
        network,
        NAMES,
        examples,
        ({},),
        plain,
        evaluated,
        calibrated,
        static=True,
        hub=hub_model(model.config, network),
    )


def check_fits(
    model: Trained, source: str, shape: tuple[int, int, int], classes: tuple[str, ...]
) -> None:
    """Refuses data of another shape, or with other classes, than the model's."""
    if list(shape) != model.config["decoded"] or classes != model.classes:
        raise DataError(
            f"{source} does not fit the model",
            found=f"data: {shape}, {len(classes)} classes;"
            f" model: {tuple(model.config['decoded'])}, {len(model.classes)} classes",
        )


def guesses(options: PredictOptions) -> Iterator[Guess]:
    """A guess for each image file; folders stand for all images in them."""
    model = trained(options.run)
    with alone(options.device, model.config) as session:
        if options.onnx:
            network: nn.Module = OnnxNetwork(Path(options.onnx), NAMES)
        else:
            network = session.place(model.network()).eval()
            model.load(network)
        for path in _files(options.inputs):
            try:
                chances = probabilities(session, model, network, path)
            except DataError as error:
                yield Guess(str(path), None, model.classes, error)
            else:
                yield Guess(str(path), chances, model.classes)


def _files(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        path = Path(name)
        if not path.is_dir():
            yield path
            continue
        found = image_files(path)
        if not found:
            raise DataError(f"{path} holds no images", remedy=", ".join(sorted(SUFFIXES)))
        yield from found


@torch.inference_mode()
def probabilities(
    session: train.Session, model: Trained, network: nn.Module, image: Path
) -> Tensor:
    """Probability of each class, float32, shape ``[classes]``.

    Raises:
        DataError: The file is no readable image.
    """
    channels, height, width = model.config["decoded"]
    remedy = "name image files, or folders of images"
    pixels = decode(image, channels, height, width, model.config["crop"], remedy)[None]
    inputs = model.normalise(pixels, session.precision.parameters, session.device)
    with session.autocast():
        outputs: Tensor = network(fitted(inputs, model.size))
    return outputs[0].float().softmax(0).cpu()
