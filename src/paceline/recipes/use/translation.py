"""Loading and evaluation of trained translation models; ``use/translate.py`` translates."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline import train
from paceline.recipes.data.pairs import Pair, PairData, load_pairs
from paceline.recipes.options import TranslationOptions
from paceline.recipes.scores import translation_scores
from paceline.recipes.tokens import (
    END_ID,
    START_ID,
    Tokenizer,
    read_tokenizer,
    sentences,
    source_rows,
)
from paceline.recipes.transformer import Search, Shape, Transformer, decode
from paceline.recipes.translation import (
    SOURCE_TOKENIZER,
    TARGET_TOKENIZER,
    evaluate,
    summary,
    translate,
)
from paceline.recipes.use import EvaluateOptions, PredictOptions
from paceline.recipes.use.evaluate import (
    Measured,
    TrainedModel,
    description_schema,
    model_config,
    run_evaluation,
    undivided,
)
from paceline.recipes.use.export import Figures, PortableModel, batches, spread_ids
from paceline.recipes.use.predict import Prediction
from paceline.spec import rundir
from paceline.spec.errors import SettingError
from paceline.spec.schema import integer, text, tuple_of

NAMES = ("source", "target")
"""Names of the network's inputs."""
_DESCRIPTION = description_schema(
    {"target": text()},
    languages=tuple_of(text(), text()),
    seq_len=integer(1),
    beam=integer(1),
)


@dataclass(frozen=True)
class TrainedTranslator(TrainedModel):
    """A trained translation model."""

    shape: Shape
    source: Tokenizer
    target: Tokenizer

    def network(self) -> Transformer:
        return Transformer(self.shape)

    def search(self, beam: int = 0) -> Search:
        """Returns the settings of the search; ``beam`` 0 takes that of the training."""
        return Search(START_ID, END_ID, self.config["seq_len"], beam or self.config["beam"])

    def load_data(self, options: EvaluateOptions) -> PairData:
        """Loads the training's corpus, or another one in the same way."""
        recorded = self.config["data"]
        split, languages = recorded["split"], self.config["languages"]
        return load_pairs(
            TranslationOptions(
                data=options.data or recorded["source"],
                data_config="" if options.data else recorded["config"],
                data_dir=options.data_dir,
                target=options.target if options.data else recorded["target"],
                source_lang=languages[0],
                target_lang=languages[1],
                val_fraction=split.get("val_fraction", 0.1),
                seed=split.get("seed", 0),
            )
        )


def load_trained(run: str) -> TrainedTranslator:
    """Loads the description and the tokenizers of a run's translation model."""
    folder = Path(run)
    with model_config(run, "translation", _DESCRIPTION) as config:
        source, target = (
            read_tokenizer(folder / rundir.MODEL / name)
            for name in (SOURCE_TOKENIZER, TARGET_TOKENIZER)
        )
        return TrainedTranslator(folder, config, Shape(**config["shape"]), source, target)


def evaluate_run(options: EvaluateOptions) -> None:
    """Evaluates once, on every rank; translates every sentence."""
    model = load_trained(options.run)
    data = undivided(options, model, model.load_data(options), lambda parts: [*chain(*parts)])
    limit, tokenizers = model.config["seq_len"], (model.source, model.target)

    def measure(session: train.Session, network: nn.Module, split: str) -> Measured:
        pairs = data.splits[split]
        figures = evaluate(session, network, sentences(pairs, tokenizers, limit, "cut"))
        rows = source_rows(model.source, [source for source, _ in pairs], limit)
        outputs = translate(session, network, rows, model.target, model.search())
        figures |= translation_scores(outputs, [target for _, target in pairs])
        return len(pairs), figures, f"{summary(figures)}  ({len(pairs)} {split} sentences)"

    run_evaluation(options, model, data, measure)


def portable(run: str) -> PortableModel:
    """Loads the network for other uses; it is measured while translating."""
    model = load_trained(run)
    network = model.load_float32()
    length = min(24, model.config["seq_len"])
    source = torch.full((2, length), END_ID)
    target = torch.full((2, length // 2), START_ID)
    # Networks in ONNX files decode greedily, so that the comparison must, too.
    search = model.search(beam=1)
    data = functools.cache(lambda: model.load_data(EvaluateOptions()))
    limit, tokenizers = model.config["seq_len"], (model.source, model.target)

    def select(part: str, limit: int) -> list[Pair]:
        pairs = data().splits[part]
        return [pairs[number] for number in spread_ids(len(pairs), limit).tolist()]

    def evaluated(candidate: nn.Module, count: int) -> Figures:
        pairs = select(data().held_out, count)
        rows = source_rows(model.source, [source for source, _ in pairs], limit)
        with train.join(device="cpu", quiet=True) as session:
            outputs = translate(session, candidate, rows, model.target, search)
        return len(pairs), translation_scores(outputs, [target for _, target in pairs])

    def calibrated(count: int) -> Iterator[tuple[Tensor, ...]]:
        training = sentences(select("train", count), tokenizers, limit, "cut")
        return (batch[:2] for batch in batches(training, count))

    return PortableModel(
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


def predictions(options: PredictOptions) -> Iterator[Prediction]:
    """Raises SettingError that names the command for translations."""
    raise SettingError(
        f"{options.run} holds a translation model",
        remedy=f'paceline translate {options.run} "a sentence"',
    )
