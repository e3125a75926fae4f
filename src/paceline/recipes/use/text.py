"""Evaluation of and prediction with trained text models."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import train
from paceline.recipes.data.tables import TABLE_FILES, decompression, read_lines, split_lines
from paceline.recipes.data.texts import Recorded, TextData, load_texts, read_texts
from paceline.recipes.networks import build_text_network
from paceline.recipes.options import TextOptions
from paceline.recipes.text import TextTensors, evaluate
from paceline.recipes.tokens import Encoding, padded_ids, saved_encoding
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
from paceline.spec.schema import MAX_LONG_TEXT, integer, list_of, text, tuple_of

NAMES = ("ids", "mask")
"""Names of the network's inputs."""
BATCH = 64
"""Texts classified at once."""
_FILES = (*TABLE_FILES, ".txt")
_DESCRIPTION = description_schema(
    {"test": text(), "columns": tuple_of(text(), text()), "delimiter": text()},
    classes=list_of(text(MAX_LONG_TEXT)),
    labels=list_of(text(MAX_LONG_TEXT)),
    max_length=integer(1),
)


@dataclass(frozen=True)
class TrainedTextModel(TrainedModel):
    """A trained text model."""

    classes: tuple[str, ...]
    encoding: Encoding

    def network(self) -> nn.Module:
        return build_text_network(self.config["network"], len(self.classes))

    def load_data(self, options: EvaluateOptions) -> TextData:
        """Loads the training's data, or others in the same way."""
        recorded = self.config["data"]
        split = recorded["split"]
        labels = tuple(self.config["labels"])
        text_options = TextOptions(
            data=options.data or recorded["source"],
            data_config="" if options.data else recorded["config"],
            data_dir=options.data_dir,
            test_data="" if options.data else recorded["test"],
            class_names=self.classes if self.classes != labels else (),
            test_fraction=split.get("test_fraction", 0.1),
            seed=split.get("seed", 0),
        )
        source = recorded["source"] if options.data else ""
        return load_texts(text_options, labels, _recorded(recorded, source))


def load_trained(run: str) -> TrainedTextModel:
    """Loads the description and the tokenizer of a run's text model."""
    with model_config(run, "text", _DESCRIPTION) as config:
        encoding = saved_encoding(Path(run), config["network"]["kind"] == "hub")
        return TrainedTextModel(Path(run), config, tuple(config["classes"]), encoding)


def evaluate_run(options: EvaluateOptions) -> None:
    """Runs one evaluation; called on every rank."""
    model = load_trained(options.run)
    data = undivided(options, model, model.load_data(options), join_rows)

    def measure(session: train.Session, network: nn.Module, split: str) -> Measured:
        if skipped := data.describe_skipped():
            session.say(skipped)
        texts = TextTensors(*data.splits[split], model.encoding, model.config["max_length"])
        figures = evaluate(session, network, texts, len(model.classes))
        summary = f"accuracy {figures['accuracy']:.4f}  f1 {figures['f1']:.4f}"
        return len(texts), figures, f"{summary}  ({len(texts)} {split} texts)"

    run_evaluation(options, model, data, measure)


def join_rows(parts: Sequence[tuple[list[str], list[int]]]) -> tuple[list[str], list[int]]:
    """Joins the texts and the class numbers of parts."""
    texts, labels = ([*itertools.chain(*columns)] for columns in zip(*parts, strict=True))
    return texts, labels


def portable(run: str) -> PortableModel:
    """Loads the network for export, benchmarks and quantization."""
    model = load_trained(run)
    network = model.load_float32()
    length = min(24, model.config["max_length"])
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length // 2 :] = False

    data = functools.cache(lambda: model.load_data(EvaluateOptions()))

    def texts(part: str, limit: int) -> TextTensors:
        texts_, labels = data().splits[part]
        ids = spread_ids(len(texts_), limit).tolist()
        subset = [texts_[i] for i in ids], [labels[i] for i in ids]
        return TextTensors(*subset, model.encoding, model.config["max_length"])

    def evaluated(candidate: nn.Module, limit: int) -> Figures:
        held_out = texts(data().held_out, limit)
        with train.join(device="cpu", quiet=True) as session:
            return len(held_out), evaluate(session, candidate, held_out, len(model.classes))

    def calibrated(limit: int) -> Iterator[tuple[Tensor, ...]]:
        return (batch[:2] for batch in batches(texts("train", limit), limit))

    return PortableModel(
        model.folder,
        model.config,
        network,
        NAMES,
        (torch.full((2, length), 1), mask),
        ({1: "tokens"}, {1: "tokens"}),
        call_network,
        evaluated,
        calibrated,
        hub=library_model(model.config, network),
    )


def predictions(options: PredictOptions) -> Iterator[Prediction]:
    """Predicts the class of each text, and of all texts in csv and text files."""
    model = load_trained(options.run)
    with local_session(options.device, model.config) as session:
        network = model.load_or_open(session, options.onnx, NAMES)
        texts = list(_texts(options.inputs, model.config["data"], model.config["labels"]))
        for start in range(0, len(texts), BATCH):
            chunk = texts[start : start + BATCH]
            rows = probabilities(session, model, network, chunk)
            for text, chances in zip(chunk, rows, strict=True):
                yield Prediction(text, chances, model.classes)


def _texts(
    inputs: Iterable[str], trained_on: Mapping[str, Any], labels: Collection[str]
) -> Iterator[str]:
    """Yields the texts; ``trained_on`` describes the data of the training."""
    for name in inputs:
        path, suffix = Path(name), Path(name).suffix.lower()
        is_file = os.path.isfile(name)  # noqa: PTH113 - pathlib fails for a long text
        if name == "-":
            yield from filter(None, split_lines(Path("/dev/stdin"), sys.stdin.buffer.read()))
        elif suffix in TABLE_FILES and is_file:
            yield from read_texts(path, _recorded(trained_on, trained_on["source"]), labels)
        elif suffix == ".txt" and is_file:
            yield from filter(None, read_lines(path))
        elif os.path.exists(name):  # noqa: PTH110 - as above
            _refuse_path(path)
        elif suffix in _FILES and " " not in name:
            raise DataError(
                f"there is no file {name}",
                remedy="correct its name; a text that ends like one needs a blank in it",
            )
        else:
            yield name


def _refuse_path(path: Path) -> None:
    """Raises DataError for a path that is not read: its name would be taken for a text."""
    remedy = f"a copy named {path.stem}.txt, if each of its lines is a text"
    if path.is_dir():
        remedy = "name the files in it"
    elif command := decompression(path):
        remedy = f"decompress it: {command}"
    raise DataError(
        f"texts are not read from {path}",
        found="a folder" if path.is_dir() else f"a file that does not end in {', '.join(_FILES)}",
        remedy=f'{remedy}; the word itself is a text if a blank follows it: "{path} "',
    )


def _recorded(trained_on: Mapping[str, Any], source: str) -> Recorded:
    label, text = trained_on["columns"]
    return Recorded((label, text), trained_on["delimiter"], source)


@torch.inference_mode()
def probabilities(
    session: train.Session, model: TrainedTextModel, network: nn.Module, texts: Sequence[str]
) -> Tensor:
    """Returns the probability of each class for each text, float32, shape ``[n, classes]``."""
    rows = model.encoding.rows(texts, model.config["max_length"])
    ids, mask = padded_ids(rows, model.encoding.pad)
    with session.autocast():
        outputs: Tensor = network(ids.to(session.device), mask.to(session.device))
    return outputs.float().softmax(1).cpu()
