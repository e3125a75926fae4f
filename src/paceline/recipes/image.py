"""Train an image classifier: ``paceline train image``, ``torchrun -m paceline.recipes.image``,
or alone.

The training is in :func:`train_image`, from top to bottom; its parts are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline import train
from paceline.recipes import common, pretrained, torchvision_models
from paceline.recipes.data.classes import describe_classes
from paceline.recipes.data.images import ImageData, load
from paceline.recipes.heads import add_layers
from paceline.recipes.networks import MODELS, backbone, describe_network, wrap_hub_model
from paceline.recipes.optimization import make_optimizer
from paceline.recipes.options import ImageOptions
from paceline.recipes.preprocessing import (
    ImageTensors,
    Normalisation,
    input_format,
    normalisation,
)
from paceline.recipes.pretrained import Origin, load_backbone
from paceline.recipes.pretrained_list import IMAGENET, RESNET_FILES, TORCHVISION_PREFIX
from paceline.spec.errors import SettingError
from paceline.spec.formatting import pluralize
from paceline.train import Best


def train_image(options: ImageOptions) -> None:
    """Runs one training; called on every rank."""
    model_input = input_format(options)
    data = load(replace(options, image_size=model_input.decode_size))
    # The small network on tiny images gains nothing from bf16.
    large = options.model != "cnn" or max(*data.shape, model_input.size) >= 16
    options = common.with_fast_dtype(options, large)
    fast = options.fast and options.dtype != "float64" and large
    with common.join("image", options) as session:
        session.agree("the data set", data.fingerprint)
        numbers = (number for part in data.splits.values() for number in part.labels.tolist())
        session.say(describe_classes("image", data.classes, numbers))
        if data.ignored:
            count = pluralize(data.ignored, "hidden or system file")
            session.say(
                f"{count} in {options.data} ignored (._*, __MACOSX, Thumbs.db and the like)"
            )
        if data.unread:
            session.say(
                f"{data.unread}, left out: not named like an image, or outside the class folders"
            )
        if data.damaged:
            count = pluralize(data.damaged, "damaged image")
            session.say(f"{count} in {options.data} left out")
        common.agree_on_precision(session, options, fast)

        normalise = model_input.normalise(data.shape[0]) or normalisation(
            data.splits["train"], data.shape[0]
        )
        size = model_input.fitted(data.shape)
        dtype = session.precision.parameters
        splits = data.splits
        training = ImageTensors(splits["train"], normalise, dtype, options.augment, size)
        watched = ImageTensors(splits[data.watched], normalise, dtype, (), size)
        held_out = ImageTensors(splits[data.held_out], normalise, dtype, (), size)
        batching = common.make_batching(session, options)
        workers = count_workers(options, training)
        loader = common.make_loader(session, options, training, batching, workers=workers)

        shape = (len(normalise.mean), size or data.shape[1], size or data.shape[2])
        network, origin = make_network(session, options, shape, data.classes)
        freezing = pretrained.make_freezing(session, options, origin, backbone(network))
        description = describe_network(network, options.model, options.add_layers)
        if fast:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        network = session.place(network, shard=options.shard)
        optimizer = make_optimizer(options, network, batching.lr)
        curve = common.make_curve(options, loader)
        schedule = freezing.schedule(optimizer, curve, len(loader))
        model = common.prepare(session, options, network, optimizer, schedule)

        def compute(batch: train.Batch) -> tuple[Tensor, dict[str, Tensor]]:
            images, labels = batch
            with session.autocast():
                outputs = model(images)
                losses = cross_entropy(
                    outputs, labels, reduction="none", label_smoothing=options.label_smoothing
                )
            return losses, {"accuracy": outputs.argmax(1) == labels}

        if common.run_trials(session, options, loader, compute):
            return
        best = Best(patience=options.patience)
        metadata = describe(options, data, shape, normalise) | {
            "network": description, "number_format": options.dtype, "channels_last": fast,
        }  # fmt: skip
        common.configure_checkpoints(session, options, best, data.fingerprint, metadata)
        result: train.Means | None = None
        for epoch in common.epochs(session, loader, options, curve, schedule, best):
            freezing.start_epoch(epoch)
            for batch in loader:
                losses, values = compute(batch)
                session.step(losses, **values)
            with session.averaged():
                result = evaluate(session, network, watched)
            session.log(data.watched, samples=result.count, **result.values())
            best.update(result["accuracy"], session.progress.step)
            curve.report(result["loss"])
            common.stop_early(
                session, options, best, f"{data.watched} accuracy", result["accuracy"]
            )

        # A resumed run that had finished has no evaluation yet.
        if result is None or data.watched != data.held_out:
            with session.averaged():
                result = evaluate(session, network, held_out)
        figures = {"samples": result.count, **result.values()}
        session.save_model({**metadata, "metrics": {data.held_out: figures}}, average=True)
        hits = round(result.sums["accuracy"])
        session.say(f"accuracy {result['accuracy']:.4f} ({hits} of {result.count} held-out images)")
        if hint := describe_chance(options, data, hits, session.progress.step):
            session.say(hint)


def describe_chance(options: ImageOptions, data: ImageData, hits: int, steps: int) -> str:
    """Says what to try if the accuracy is that of a constant answer; empty if it is better."""
    counts = np.bincount(data.splits[data.held_out].labels, minlength=1)
    largest, total = int(counts.max()), int(counts.sum())
    if hits > largest or largest == total or options.data == "dummy":
        return ""
    frequent = data.classes[int(counts.argmax())]
    return (
        f"this is no better than always answering {frequent} ({largest} of {total}): if"
        f" images and classes are right, {pluralize(steps, 'step')} may be too few;"
        f" try --epochs {4 * options.epochs} or --global-batch {max(1, options.global_batch // 4)},"
        " or pretrained weights"
    )


@torch.inference_mode()
def evaluate(session: train.Session, network: nn.Module, pictures: ImageTensors) -> train.Means:
    """Returns loss and accuracy over every image exactly once, equal on every rank."""
    session.phase("evaluate")
    network.eval()
    meter = session.meter()
    for batch in session.shard(pictures):
        images, labels = batch
        with session.autocast():
            outputs = network(images)
        losses = cross_entropy(outputs, labels, reduction="none")
        top5 = (outputs.topk(min(5, outputs.shape[1])).indices == labels[:, None]).any(1)
        meter.add(batch.count, loss=losses, accuracy=outputs.argmax(1) == labels, top5=top5)
    network.train()
    return meter.result()


def count_workers(options: ImageOptions, training: ImageTensors) -> int | None:
    """Returns the number of loader processes of a rank; ``None`` for automatic."""
    if options.workers > 0 and not training.processes:
        raise SettingError(
            f"--workers {options.workers}: processes have nothing to do for --data {options.data}",
            found="these images are decoded once and kept in the memory of each rank",
            remedy="leave it out",
        )
    return options.workers if options.workers >= 0 else None


def make_network(
    session: train.Session,
    options: ImageOptions,
    shape: tuple[int, int, int],
    classes: Sequence[str],
) -> tuple[nn.Module, Origin]:
    """Creates the network that the options name, with its initial weights."""
    network: nn.Module
    if options.model in MODELS:
        network, origin = MODELS[options.model](shape, len(classes)), Origin()
    elif options.model.startswith(TORCHVISION_PREFIX):
        arguments = options.model, classes, options.offline, options.from_scratch
        network, origin = session.together(lambda: torchvision_models.load(*arguments))
    else:
        hub_model = pretrained.HubModel(
            "image", options.model, options.offline, options.from_scratch
        )
        model, origin = session.together(lambda: pretrained.load_model(hub_model, classes))
        network = wrap_hub_model(model)
    add_layers(network, backbone(network), options.add_layers)
    if source := options.weights:
        parts = backbone(network)
        if source == IMAGENET:
            file = RESNET_FILES[options.model]
            path = session.together(lambda: pretrained.ensure_torch_file(file, options.offline))
            source = str(path)
        origin = session.together(lambda: load_backbone(network, parts, source, classes))
    return network, origin


def describe(
    options: ImageOptions,
    data: ImageData,
    shape: tuple[int, int, int],
    normalise: Normalisation,
) -> dict[str, Any]:
    """Describes the model and its data, for its use and for the record."""
    return {
        "format": 1,
        "task": "image",
        "model": options.model,
        "shape": list(shape),
        "decoded": list(data.shape),
        "crop": options.crop,
        "classes": list(data.classes),
        "normalisation": normalise.to_json(),
        "data": {
            "source": data.source,
            "folder": str(Path(options.data_dir).expanduser().absolute())
            if options.data_dir
            else "",
            "config": options.data_config,
            "skip_damaged": options.skip_damaged,
            "fingerprint": data.fingerprint,
            "split": data.split,
            "sizes": {name: len(split.labels) for name, split in data.splits.items()},
        },
        "seed": options.seed,
    }


main = partial(common.run, "image", train_image)


if __name__ == "__main__":
    sys.exit(main())
