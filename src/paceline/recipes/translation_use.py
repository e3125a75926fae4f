"""Evaluation of a trained translation model; using it is ``paceline translate``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from paceline import train
from paceline.recipes.datasets.pairs import load_pairs
from paceline.recipes.decoding import decode
from paceline.recipes.evaluate import check_unchanged, choose_split, joined, report
from paceline.recipes.evaluate_options import EvaluateOptions, PredictOptions
from paceline.recipes.portable import Portable
from paceline.recipes.predict import Guess
from paceline.recipes.scores import scores
from paceline.recipes.sentences import sentences, source_rows
from paceline.recipes.tokenizing import END_ID, START_ID
from paceline.recipes.translated import translator
from paceline.recipes.translation import evaluate, summary, translate
from paceline.spec.errors import SettingError


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
    search = model.search()
    return Portable(
        model.folder,
        model.config,
        network,
        ("source", "target"),
        (source, target),
        ({1: "source tokens"}, {1: "target tokens"}),
        lambda inputs: decode(network, inputs[0], search),
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
