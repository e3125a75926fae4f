"""Train or fine-tune a text classifier: ``paceline train text``,
``torchrun -m paceline.recipes.text``, or alone.

The training is in :func:`train_text`, from top to bottom; its parts are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from paceline import train
from paceline.recipes import common, pretrained
from paceline.recipes.data import local_path
from paceline.recipes.data.texts import TextData, load_texts
from paceline.recipes.heads import add_layers
from paceline.recipes.networks import HubClassifier, TextClassifier
from paceline.recipes.optimization import make_optimizer
from paceline.recipes.options import TEXT_MODELS, TextOptions
from paceline.recipes.pretrained import Origin, load_backbone
from paceline.recipes.tokens import (
    TOKENIZER,
    Encoding,
    HubEncoding,
    TrainedEncoding,
    from_json,
    padded_ids,
    read_tokenizer,
    train_tokenizer,
)
from paceline.spec import rundir
from paceline.train import Best, Draws


def train_text(options: TextOptions) -> None:
    """Runs one training; called on every rank."""
    data = load_texts(options)
    options = common.with_fast_dtype(options, options.model not in TEXT_MODELS)
    with common.join("text", options) as session:
        session.agree("the data set", data.fingerprint)
        for remark in data.remarks():
            session.say(remark)
        common.agree_on_precision(session, options)
        encoding = make_encoding(session, data, options)
        training = TextTensors(*data.splits["train"], encoding, options.max_length)
        held_out = TextTensors(*data.splits[data.held_out], encoding, options.max_length)
        batching, lengths = common.make_batching(session, options), training.lengths()
        loader = common.make_loader(session, options, training, batching, lengths)

        network, origin = make_network(session, data, options, encoding)
        freezing = pretrained.make_freezing(session, options, origin, [network.backbone])
        placed = session.place(network, shard=options.shard)
        optimizer = make_optimizer(options, placed, batching.lr)
        curve = common.make_curve(options, loader)
        schedule = freezing.schedule(optimizer, curve, len(loader))
        model = common.prepare(session, options, placed, optimizer, schedule)

        def compute(batch: train.Batch) -> tuple[Tensor, dict[str, Tensor]]:
            ids, mask, labels = batch
            with session.autocast():
                outputs = model(ids, mask)
                losses = cross_entropy(
                    outputs, labels, reduction="none", label_smoothing=options.label_smoothing
                )
            return losses, {"accuracy": outputs.argmax(1) == labels}

        if common.run_trials(session, options, loader, compute, lengths):
            return
        best = Best(patience=options.patience)
        metadata = describe(options, data, network)
        common.configure_checkpoints(
            session, options, best, data.fingerprint, metadata, tokenizer=options.tokenizer
        )
        figures: dict[str, float] = {}
        for epoch in common.epochs(session, loader, options, curve, schedule, best):
            freezing.start_epoch(epoch)
            for batch in loader:
                losses, values = compute(batch)
                session.step(losses, **values)
            with session.averaged():
                figures = evaluate(session, placed, held_out, len(data.classes))
            session.log(data.held_out, samples=len(held_out), **figures)
            best.update(figures["accuracy"], session.progress.step)
            curve.report(figures["loss"])
            accuracy = figures["accuracy"]
            common.stop_early(session, options, best, f"{data.held_out} accuracy", accuracy)

        # A resumed run that had finished has no evaluation yet.
        with session.averaged():
            figures = figures or evaluate(session, placed, held_out, len(data.classes))
        measured = {"samples": len(held_out), **figures}
        session.save_model({**metadata, "metrics": {data.held_out: measured}}, average=True)
        session.say(
            f"accuracy {figures['accuracy']:.4f}  f1 {figures['f1']:.4f}"
            f"  ({len(held_out)} held-out texts)"
        )


class TextTensors:
    """A part of a data set as tensors, padded to the longest text of each batch.

    Args:
        limit: Maximum tokens of a text.
    """

    def __init__(
        self, texts: Sequence[str], labels: Sequence[int], encoding: Encoding, limit: int
    ) -> None:
        self._rows, self._pad = encoding.rows(texts, limit), encoding.pad
        self._labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self._rows)

    def lengths(self) -> list[int]:
        """Returns the number of tokens of each text."""
        return [len(row) for row in self._rows]

    def batch(self, ids: NDArray[Any], draws: Draws | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token ids ``[n, t]``, a mask that is false for padding, and labels ``[n]``."""
        tokens, mask = padded_ids([self._rows[i] for i in ids.tolist()], self._pad)
        return tokens, mask, self._labels[torch.from_numpy(ids)]


@torch.inference_mode()
def evaluate(
    session: train.Session, network: nn.Module, held_out: TextTensors, classes: int
) -> dict[str, float]:
    """Returns loss, accuracy and F1 over every text exactly once, equal on every rank."""
    session.phase("evaluate")
    network.eval()
    meter = session.meter()
    # Rows are true classes, columns predicted ones.
    confusion = torch.zeros(classes, classes, dtype=torch.float64, device=session.device)
    for batch in session.shard(held_out, 128):
        ids, mask, labels = batch
        with session.autocast():
            outputs = network(ids, mask)
        losses, guesses = cross_entropy(outputs, labels, reduction="none"), outputs.argmax(1)
        meter.add(batch.count, loss=losses, accuracy=guesses == labels)
        target, guessed = (one_hot(t, classes).double() for t in batch.counted(labels, guesses))
        confusion += target.T @ guessed
    network.train()
    table = session.comms.sum(confusion.flatten()).view_as(confusion)
    return {**meter.result().values(), "f1": macro_f1(table)}


def macro_f1(confusion: Tensor) -> float:
    """Returns the mean F1 over the classes that occur; rows are true classes."""
    hits, both = confusion.diag(), confusion.sum(0) + confusion.sum(1)
    occurs = both > 0
    return float((2 * hits[occurs] / both[occurs]).mean())


def make_encoding(session: train.Session, data: TextData, options: TextOptions) -> Encoding:
    """Returns the tokenizer and saves it with the run.

    It is the pretrained model's, that of the run in --weights, or a new one that rank 0 trains.
    """
    encoding: Encoding
    if options.model not in TEXT_MODELS:
        hub_model = pretrained.HubModel("text", options.model, options.offline)
        encoding = HubEncoding(session.together(lambda: pretrained.load_tokenizer(hub_model)))
    else:

        def make() -> str:
            run = local_path(Path(options.weights).expanduser())
            if (saved := run / rundir.MODEL / TOKENIZER).is_file():
                return read_tokenizer(saved).to_json()
            kind, texts = options.tokenizer, data.splits["train"][0]
            return train_tokenizer(kind, texts, options.vocab_size).to_json()

        encoding = TrainedEncoding(from_json(session.comms.by_first(make)))
    session.keep(rundir.MODEL, lambda folder: encoding.save(folder / rundir.MODEL))
    return encoding


def make_network(
    session: train.Session, data: TextData, options: TextOptions, encoding: Encoding
) -> tuple[TextClassifier | HubClassifier, Origin]:
    """Creates the network that the options name, with its initial weights."""
    network: TextClassifier | HubClassifier
    if options.model not in TEXT_MODELS:
        hub_model = pretrained.HubModel(
            "text", options.model, options.offline, options.from_scratch
        )
        model, origin = session.together(lambda: pretrained.load_model(hub_model, data.classes))
        network = HubClassifier(model)
    else:
        assert isinstance(encoding, TrainedEncoding)
        tokens, classes = len(encoding.tokenizer), len(data.classes)
        network, origin = TextClassifier(options.model, tokens, classes, options.dropout), Origin()
    backbone = [network.backbone]
    add_layers(network, backbone, options.add_layers)
    if source := options.weights:
        origin = session.together(lambda: load_backbone(network, backbone, source, data.classes))
    return network, origin


def describe(
    options: TextOptions, data: TextData, network: TextClassifier | HubClassifier
) -> dict[str, Any]:
    """Describes the model and its data, for its use and for the record."""
    return {
        "format": 1,
        "task": "text",
        "model": options.model,
        "network": describe_network(options, network),
        "classes": list(data.classes),
        "labels": list(data.labels),
        "max_length": options.max_length,
        "data": {
            "source": data.source,
            "test": options.test_data,
            "config": options.data_config,
            "columns": [*data.columns],
            "delimiter": options.delimiter,
            "fingerprint": data.fingerprint,
            "split": data.split,
            "sizes": {name: len(labels) for name, (_, labels) in data.splits.items()},
        },
        "seed": options.seed,
        # Not "dtype": transformers reads this file, too, and expects a torch dtype there.
        "number_format": options.dtype,
    }


def describe_network(
    options: TextOptions, network: TextClassifier | HubClassifier
) -> dict[str, Any]:
    """Describes the network, to build it again."""
    if isinstance(network, HubClassifier):
        config = pretrained.describe_config(network.model)
        return {"kind": "hub", "config": config, "layers": [*options.add_layers]}
    tokens = next(network.backbone.parameters()).shape[0]
    settings = {"dropout": options.dropout, "layers": [*options.add_layers]}
    return {"kind": options.model, "tokens": tokens, **settings}


main = partial(common.run, "text", train_text)


if __name__ == "__main__":
    sys.exit(main())
