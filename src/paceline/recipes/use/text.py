"""A trained text model: read from its run directory without running code, evaluated, used."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import train
from paceline.recipes.data import HubSource
from paceline.recipes.data.texts import TextRequest, load_texts, rows_of
from paceline.recipes.networks import rebuilt_texts
from paceline.recipes.text import Texts, evaluate
from paceline.recipes.tokens import Encoding, padded_ids, saved_encoding
from paceline.recipes.use import EvaluateOptions, PredictOptions
from paceline.recipes.use.evaluate import alone, check_unchanged, choose_split, joined, report
from paceline.recipes.use.export import Figures, Portable, batches, hub_model, plain, spread
from paceline.recipes.use.onnx_file import OnnxNetwork
from paceline.recipes.use.predict import Guess
from paceline.spec.errors import DataError

NAMES = ("ids", "mask")
"""Of the network's inputs."""
TOGETHER = 64
"""Texts that are classified at once."""


@dataclass(frozen=True)
class Trained:
    """A model as described by ``model/config.json``.

    Attributes:
        folder: The run directory.
        config: The whole description.
        classes: Name of each class.
        encoding: The tokenizer.
    """

    folder: Path
    config: dict[str, Any]
    classes: tuple[str, ...]
    encoding: Encoding

    def network(self) -> nn.Module:
        """A new network of this shape, with initial weights."""
        return rebuilt_texts(self.config["network"], len(self.classes))

    def request(self, data: str = "") -> TextRequest:
        """How to read the data that it was trained on, or others in the same way."""
        recorded = self.config["data"]
        split, columns = recorded["split"], recorded["columns"]
        labels = tuple(self.config["labels"])
        return TextRequest(
            HubSource(data or recorded["source"], "" if data else recorded["config"]),
            "" if data else recorded["test"],
            (columns[0], columns[1]),
            recorded["delimiter"],
            self.classes if self.classes != labels else (),
            labels,
            split.get("test_fraction", 0.1),
            split.get("seed", 0),
        )


def trained(run: str) -> Trained:
    """The text model of a run.

    Raises:
        DataError: There is no model, or none of the text recipe.
    """
    folder = Path(run)
    config = train.load_config(folder)
    try:
        if config["task"] != "text":
            raise ValueError(f"its model was trained by the recipe {config['task'] or '(unnamed)'}")
        encoding = saved_encoding(folder, config["network"]["kind"] == "hub")
        return Trained(folder, config, tuple(config["classes"]), encoding)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{folder} holds no model of the text recipe",
            found=f"model/config.json: {type(error).__name__} {error}",
        ) from None


def evaluate_run(options: EvaluateOptions) -> None:
    """One evaluation, on every rank."""
    model = trained(options.run)
    data = load_texts(replace(model.request(options.data), data_dir=options.data_dir))
    check_unchanged(data.source, data.fingerprint, model.config, options)
    split = choose_split(data.splits, options.split, data.held_out)
    with joined(options, model.config) as session:
        session.agree("the data set", data.fingerprint)
        network = session.place(model.network())
        train.load_weights(model.folder, network)
        texts = Texts(*data.splits[split], model.encoding, model.config["max_length"])
        figures = evaluate(session, network, texts, len(model.classes))
        report(session, options, split, len(texts), figures)
        shown = f"accuracy {figures['accuracy']:.4f}  f1 {figures['f1']:.4f}"
        session.say(f"{shown}  ({len(texts)} {split} texts)")


def portable(run: str) -> Portable:
    """The network for other uses."""
    model = trained(run)
    network = model.network().eval()
    train.load_weights(model.folder, network)
    network = network.float()
    length = min(24, model.config["max_length"])
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length // 2 :] = False

    data = functools.cache(lambda: load_texts(model.request()))

    def texts(part: str, most: int) -> Texts:
        words, labels = data().splits[part]
        ids = spread(len(words), most).tolist()
        some = [words[i] for i in ids], [labels[i] for i in ids]
        return Texts(*some, model.encoding, model.config["max_length"])

    def evaluated(other: nn.Module, most: int) -> Figures:
        found = texts(data().held_out, most)
        with train.join(device="cpu", quiet=True) as session:
            return len(found), evaluate(session, other, found, len(model.classes))

    def calibrated(most: int) -> Iterator[tuple[Tensor, ...]]:
        return (one[:2] for one in batches(texts("train", most), most))

    return Portable(
        model.folder,
        model.config,
        network,
        NAMES,
        (torch.full((2, length), 1), mask),
        ({1: "tokens"}, {1: "tokens"}),
        plain,
        evaluated,
        calibrated,
        hub=hub_model(model.config, network),
    )


def guesses(options: PredictOptions) -> Iterator[Guess]:
    """A guess for each text; csv and text files stand for all texts in them."""
    model = trained(options.run)
    with alone(options.device, model.config) as session:
        if options.onnx:
            network: nn.Module = OnnxNetwork(Path(options.onnx), NAMES)
        else:
            network = session.place(model.network()).eval()
            train.load_weights(model.folder, network)
        texts = list(_texts(options.inputs, model.config["data"]["columns"][1]))
        for start in range(0, len(texts), TOGETHER):
            chunk = texts[start : start + TOGETHER]
            rows = probabilities(session, model, network, chunk)
            for text, chances in zip(chunk, rows, strict=True):
                yield Guess(text, chances, model.classes)


def _texts(inputs: Iterable[str], column: str) -> Iterator[str]:
    for one in inputs:
        path = Path(one)
        if path.suffix.lower() in (".csv", ".tsv") and path.is_file():
            yield from _column(path, column)
        elif path.suffix.lower() == ".txt" and path.is_file():
            yield from (line for line in path.read_text(encoding="utf-8").splitlines() if line)
        else:
            yield one


def _column(path: Path, column: str) -> Iterator[str]:
    """The texts of a table: of the named column, else of ``text``, else of the only or second."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = rows_of(path, file, delimiter)
    if not rows:
        raise DataError(f"{path} is empty")
    name = column or "text"
    if name in rows[0]:
        place, rows = rows[0].index(name), rows[1:]
    else:
        place = min(1, len(rows[0]) - 1)
    yield from (row[place] for row in rows if len(row) > place)


@torch.inference_mode()
def probabilities(
    session: train.Session, model: Trained, network: nn.Module, texts: Sequence[str]
) -> Tensor:
    """Probability of each class for each text, float32, shape ``[n, classes]``."""
    rows = model.encoding.rows(texts, model.config["max_length"])
    ids, mask = padded_ids(rows, model.encoding.pad)
    with session.autocast():
        outputs: Tensor = network(ids.to(session.device), mask.to(session.device))
    return outputs.float().softmax(1).cpu()
