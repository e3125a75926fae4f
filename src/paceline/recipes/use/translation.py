"""A trained translation model: read from its run directory without running code, and evaluated.

Using it is ``paceline translate``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import train
from paceline.recipes.data import HubSource
from paceline.recipes.data.pairs import Pair, PairRequest, load_pairs
from paceline.recipes.scores import scores
from paceline.recipes.tokens import END_ID, START_ID, Tokenizer, from_json, sentences, source_rows
from paceline.recipes.transformer import Search, Shape, Transformer, decode
from paceline.recipes.translation import (
    SOURCE_TOKENIZER,
    TARGET_TOKENIZER,
    evaluate,
    summary,
    translate,
)
from paceline.recipes.use import EvaluateOptions, PredictOptions
from paceline.recipes.use.evaluate import check_unchanged, choose_split, joined, report
from paceline.recipes.use.export import Figures, Portable, batches, spread
from paceline.recipes.use.predict import Guess
from paceline.spec import rundir
from paceline.spec.errors import DataError, SettingError
from paceline.train import load_config

NAMES = ("source", "target")
"""Of the network's inputs."""


@dataclass(frozen=True)
class Translator:
    """A model as described by ``model/config.json``.

    Attributes:
        folder: The run directory.
        config: The whole description.
        shape: Of the network.
        source, target: The tokenizers.
    """

    folder: Path
    config: dict[str, Any]
    shape: Shape
    source: Tokenizer
    target: Tokenizer

    def network(self) -> Transformer:
        """A new network of this shape, with initial weights."""
        return Transformer(self.shape)

    def search(self, beam: int = 0) -> Search:
        """How to decode; the beams of the training unless others are asked for."""
        return Search(START_ID, END_ID, self.config["seq_len"], beam or self.config["beam"])

    def request(self, data: str = "", target: str = "") -> PairRequest:
        """How to read the corpus that it was trained on, or another one in the same way."""
        recorded = self.config["data"]
        split, languages = recorded["split"], self.config["languages"]
        config = "" if data else recorded["config"]
        return PairRequest(
            HubSource(data or recorded["source"], config),
            target if data else recorded["target"],
            (languages[0], languages[1]),
            split.get("val_fraction", 0.1),
            split.get("seed", 0),
        )


def translator(folder: Path) -> Translator:
    """The translation model of a run.

    Raises:
        DataError: There is no model, or none of the translation recipe.
    """
    config = load_config(folder)
    try:
        if config["task"] != "translation":
            raise ValueError(f"its model was trained by the recipe {config['task'] or '(unnamed)'}")
        shape = Shape(**config["shape"])
        texts = [
            (folder / rundir.MODEL / name).read_text(encoding="utf-8")
            for name in (SOURCE_TOKENIZER, TARGET_TOKENIZER)
        ]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{folder} holds no model of the translation recipe",
            found=f"model/config.json: {type(error).__name__} {error}",
        ) from None
    return Translator(folder, config, shape, from_json(texts[0]), from_json(texts[1]))


def evaluate_run(options: EvaluateOptions) -> None:
    """One evaluation, on every rank; every sentence is translated."""
    model = translator(Path(options.run))
    request = model.request(options.data, options.target)
    data = load_pairs(replace(request, data_dir=options.data_dir))
    check_unchanged(data.source, data.fingerprint, model.config, options)
    split = choose_split(data.splits, options.split, data.held_out)
    pairs = data.splits[split]
    limit, tokenizers = model.config["seq_len"], (model.source, model.target)
    with joined(options, model.config) as session:
        session.agree("the corpus", data.fingerprint)
        network = session.place(model.network())
        train.load_weights(model.folder, network)
        figures = evaluate(session, network, sentences(pairs, tokenizers, limit, "cut"))
        rows = source_rows(model.source, [source for source, _ in pairs], limit)
        outputs = translate(session, network, rows, model.target, model.search())
        figures |= scores(outputs, [target for _, target in pairs])
        report(session, options, split, len(pairs), figures)
        session.say(f"{summary(figures)}  ({len(pairs)} {split} sentences)")


def portable(run: str) -> Portable:
    """The network for other uses; it is measured as it translates, not as it trains."""
    model = translator(Path(run))
    network = model.network().eval()
    train.load_weights(model.folder, network)
    network = network.float()
    length = min(24, model.config["seq_len"])
    source = torch.full((2, length), END_ID)
    target = torch.full((2, length // 2), START_ID)
    # A network in a file decodes greedily; what is compared with it does so, too.
    search = model.search(beam=1)
    data = functools.cache(lambda: load_pairs(model.request()))
    limit, tokenizers = model.config["seq_len"], (model.source, model.target)

    def some(part: str, most: int) -> list[Pair]:
        pairs = data().splits[part]
        return [pairs[number] for number in spread(len(pairs), most).tolist()]

    def evaluated(other: nn.Module, most: int) -> Figures:
        pairs = some(data().held_out, most)
        rows = source_rows(model.source, [source for source, _ in pairs], limit)
        with train.join(device="cpu", quiet=True) as session:
            outputs = translate(session, other, rows, model.target, search)
        return len(pairs), scores(outputs, [target for _, target in pairs])

    def calibrated(most: int) -> Iterator[tuple[Tensor, ...]]:
        training = sentences(some("train", most), tokenizers, limit, "cut")
        return (one[:2] for one in batches(training, most))

    return Portable(
        model.folder,
        model.config,
        network,
        NAMES,
        (source, target),
        ({1: "source tokens"}, {1: "target tokens"}),
        lambda other, inputs: decode(other, inputs[0], model.search()),
        evaluated,
        calibrated,
        figure=("bleu", 100.0),
    )


def guesses(options: PredictOptions) -> Iterator[Guess]:
    """A translation is not chosen among classes.

    Raises:
        SettingError: Always; it names the right command.
    """
    raise SettingError(
        f"{options.run} holds a translation model",
        remedy=f'paceline translate {options.run} "a sentence"',
    )
