"""Train an image classifier: ``paceline train image``, ``torchrun -m paceline.recipes.image``,
or alone.

The whole training is in :func:`train_image`, from top to bottom.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import train
from paceline.recipes import parse_options
from paceline.recipes.datasets.find import load
from paceline.recipes.datasets.images import ImageData, Request
from paceline.recipes.image_options import ImageOptions
from paceline.recipes.models import MODELS
from paceline.recipes.pictures import Normalisation, Pictures, normalisation
from paceline.recipes.running import guarded
from paceline.train.batching import batching
from paceline.train.optimizers import optimizer as make_optimizer
from paceline.train.schedules import Curve, scheduled
from paceline.train.stopping import Best


def train_image(options: ImageOptions) -> None:
    """One training, on every rank."""
    data = load_data(options)
    with train.join(
        "image",
        seed=options.seed,
        device=options.device,
        backend=options.backend,
        dtype=options.dtype,
        run_dir=options.run_dir,
        log_every=options.log_every,
        check_every=options.check_every,
    ) as session:
        session.agree("the data set", data.fingerprint)
        session.save_config({"recipe": "image", "options": asdict(options)})

        normalise = normalisation(data.splits["train"], data.shape[0])
        numbers = session.precision.parameters
        training = Pictures(data.splits["train"], normalise, numbers, options.augment)
        watched = Pictures(data.splits[data.watched], normalise, numbers)
        held_out = Pictures(data.splits[data.held_out], normalise, numbers)
        batch = batching(
            session.world.size,
            global_batch=options.global_batch,
            lr=options.lr,
            per_rank=options.batch_per_process,
            limit=options.micro_batch,
            rule=options.scale_lr,
        )
        session.say(batch.describe())
        loader = session.loader(training, batch.global_batch, limit=batch.limit)

        network = MODELS[options.model](data.shape, len(data.classes))
        network = session.place(network, shard=options.shard)
        optimizer = make_optimizer(
            options.optimizer,
            network,
            batch.lr,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
        )
        steps = options.steps or options.epochs * len(loader)
        curve = Curve(options.schedule, steps, options.warm_up)
        model = session.prepare(
            network,
            optimizer,
            scheduled(optimizer, curve),
            clip_norm=options.clip_norm or None,
            compile=options.compile,
        )

        best = Best(patience=options.patience)
        session.checkpoints(
            every=options.checkpoint_every,
            keep=options.keep,
            resume=options.resume,
            best=best,
            identity={
                "model": options.model,
                "data": data.fingerprint,
                "seed": options.seed,
                "dtype": options.dtype,
            },
            stop_when_full=options.when_full == "stop",
        )
        for _ in session.epochs(loader, options.epochs, options.steps):
            for images, labels in loader:
                with session.autocast():
                    outputs = model(images)
                    losses = cross_entropy(
                        outputs, labels, reduction="none", label_smoothing=options.label_smoothing
                    )
                session.step(losses, accuracy=outputs.argmax(1) == labels)
            result = evaluate(session, network, watched)
            session.log(data.watched, samples=result.count, **result.values())
            best.update(result["accuracy"], session.progress.step)
            curve.report(result["loss"])
            if best.stop:
                session.stop(f"no better {data.watched} accuracy in {best.stale} evaluations")

        result = evaluate(session, network, held_out)
        session.save_model(describe(options, data, normalise, result))
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


def load_data(options: ImageOptions) -> ImageData:
    """The data set that the options name."""
    request = Request(
        options.data,
        image_size=options.image_size,
        test_fraction=options.test_fraction,
        val_fraction=options.val_fraction,
        seed=options.seed,
    )
    return load(options.data_dir, request)


def describe(
    options: ImageOptions, data: ImageData, normalise: Normalisation, result: train.Means
) -> dict[str, Any]:
    """Everything that is needed to use the model, and where it came from."""
    return {
        "format": 1,
        "task": "image",
        "model": options.model,
        "shape": list(data.shape),
        "classes": list(data.classes),
        "normalisation": normalise.to_json(),
        "data": {
            "source": data.source,
            "fingerprint": data.fingerprint,
            "split": data.split,
            "sizes": {name: len(split.labels) for name, split in data.splits.items()},
        },
        "metrics": {data.held_out: {"samples": result.count, **result.values()}},
        "seed": options.seed,
        "dtype": options.dtype,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe in this process; returns the exit status."""
    flags = sys.argv[1:] if argv is None else argv
    return guarded(lambda: train_image(cast(ImageOptions, parse_options("image", flags))))


if __name__ == "__main__":
    sys.exit(main())
