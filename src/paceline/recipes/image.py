"""Train an image classifier: ``paceline train image``, ``torchrun -m paceline.recipes.image``,
or alone.

The training is in :func:`train_image`, from top to bottom; its parts are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline import train
from paceline.recipes import common, pretrained, torchvision_models
from paceline.recipes.data.images import ImageData, Request, load
from paceline.recipes.heads import add_layers
from paceline.recipes.networks import MODELS, backbone, describe_network, hub_images
from paceline.recipes.options import ImageOptions
from paceline.recipes.pictures import Inputs, Normalisation, Pictures, inputs, normalisation
from paceline.recipes.pretrained import Origin, load_backbone
from paceline.recipes.published import FILES, IMAGENET
from paceline.spec.errors import SettingError
from paceline.train import Best


def train_image(options: ImageOptions) -> None:
    """One training, on every rank."""
    wants = inputs(options)
    data = load_data(options, wants)
    # The small network on tiny images has nothing that would be faster.
    large = options.model != "cnn" or max(*data.shape, wants.size) >= 16
    options = common.effective(options, large)
    fast = options.fast and options.dtype != "float64" and large
    with common.join("image", options) as session:
        session.agree("the data set", data.fingerprint)
        if data.ignored:
            session.say(
                f"{data.ignored} hidden or system files in {options.data} are ignored "
                "(._*, __MACOSX, Thumbs.db and the like)"
            )
        common.agree_format(session, options, fast)

        normalise = wants.normalise(data.shape[0]) or normalisation(
            data.splits["train"], data.shape[0]
        )
        size = wants.fitted(data.shape)
        numbers = session.precision.parameters
        splits = data.splits
        training = Pictures(splits["train"], normalise, numbers, options.augment, size)
        watched = Pictures(splits[data.watched], normalise, numbers, (), size)
        held_out = Pictures(splits[data.held_out], normalise, numbers, (), size)
        batch = common.batch_of(session, options)
        workers = workers_of(options, training)
        loader = common.loader_of(session, options, training, batch, workers=workers)

        shape = (len(normalise.mean), size or data.shape[1], size or data.shape[2])
        network, origin = make_network(session, options, shape, data.classes)
        freezing = pretrained.freezing(session, options, origin, backbone(network))
        description = describe_network(network, options.model, options.add_layers)
        if fast:
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        network = session.place(network, shard=options.shard)
        optimizer = common.optimizer_of(options, network, batch.lr)
        curve = common.curve_of(options, loader)
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

        if common.tried(session, options, loader, compute):
            return
        best = Best(patience=options.patience)
        more = {"network": description, "number_format": options.dtype, "channels_last": fast}
        about = describe(options, data, wants, shape, normalise) | more
        common.keep_checkpoints(session, options, best, data.fingerprint, about)
        result: train.Means | None = None
        for epoch in common.epochs(session, loader, options):
            freezing.begin(epoch)
            for given in loader:
                losses, values = compute(given)
                session.step(losses, **values)
            with session.averaged():
                result = evaluate(session, network, watched)
            session.log(data.watched, samples=result.count, **result.values())
            best.update(result["accuracy"], session.progress.step)
            curve.report(result["loss"])
            common.end_early(session, options, best, f"{data.watched} accuracy", result["accuracy"])

        # Nothing was evaluated where a finished training was resumed.
        if result is None or data.watched != data.held_out:
            with session.averaged():
                result = evaluate(session, network, held_out)
        figures = {"samples": result.count, **result.values()}
        session.save_model({**about, "metrics": {data.held_out: figures}}, average=True)
        hits = round(result.sums["accuracy"])
        session.say(f"accuracy {result['accuracy']:.4f} ({hits} of {result.count} held-out images)")


@torch.inference_mode()
def evaluate(session: train.Session, network: nn.Module, pictures: Pictures) -> train.Means:
    """Loss and accuracy over every image exactly once, the same on every rank."""
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


def load_data(options: ImageOptions, wants: Inputs) -> ImageData:
    """The data set that the options name."""
    request = Request(
        options.data,
        image_size=wants.decoded,
        test_fraction=options.test_fraction,
        val_fraction=options.val_fraction,
        seed=options.seed,
        crop=wants.crop,
        skip_damaged=options.skip_damaged,
        config=options.data_config,
        offline=options.offline,
        mirror=options.mirror,
    )
    return load(options.data_dir, request)


def workers_of(options: ImageOptions, training: Pictures) -> int | None:
    """Loader processes of a rank; None: as many as suit. SettingError where they have no work."""
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
    """The network that the options name, with the weights from which it starts."""
    network: nn.Module
    if options.model.startswith(torchvision_models.PREFIX):
        given = options.model, classes, options.offline, options.from_scratch
        network, origin = session.together(lambda: torchvision_models.load(*given))
        add_layers(network, backbone(network), options.add_layers)
        return network, origin
    if options.model not in MODELS:
        wanted = pretrained.HubModel("image", options.model, options.offline, options.from_scratch)
        model, origin = session.together(lambda: pretrained.load_model(wanted, classes))
        network = hub_images(model)
        add_layers(network, backbone(network), options.add_layers)
        return network, origin
    network, origin = MODELS[options.model](shape, len(classes)), Origin()
    add_layers(network, backbone(network), options.add_layers)
    if source := options.weights:
        parts = backbone(network)
        if source == IMAGENET:
            name = FILES[options.model]
            source = str(
                session.together(lambda: pretrained.torch_file_here(name, options.offline))
            )
        origin = session.together(lambda: load_backbone(network, parts, source, classes))
    return network, origin


def describe(
    options: ImageOptions,
    data: ImageData,
    wants: Inputs,
    shape: tuple[int, int, int],
    normalise: Normalisation,
) -> dict[str, Any]:
    """Everything that is needed to use the model, and where it came from."""
    return {
        "format": 1,
        "task": "image",
        "model": options.model,
        "shape": list(shape),
        "decoded": list(data.shape),
        "crop": wants.crop,
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe in this process; returns the exit status."""
    return common.run("image", train_image, argv)


if __name__ == "__main__":
    sys.exit(main())
