"""Train a translation transformer: ``paceline train translation``,
``torchrun -m paceline.recipes.translation``, or alone.

The training is in :func:`train_translation`, from top to bottom; its parts are imported.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.recipes import common
from paceline.recipes.data.pairs import Pair, PairData, load_pairs
from paceline.recipes.optimization import make_optimizer
from paceline.recipes.options import TranslationOptions
from paceline.recipes.scores import translation_scores
from paceline.recipes.tokens import (
    END_ID,
    PAD_ID,
    START_ID,
    Sentences,
    Sources,
    Tokenizer,
    from_json,
    sentences,
    source_rows,
    train_tokenizer,
)
from paceline.recipes.transformer import Search, Shape, Transformer, decode
from paceline.spec import rundir
from paceline.spec.schema import MAX_LONG_TEXT, integer, list_of, text, tuple_of
from paceline.train import Best, files
from paceline.train.comms import parse_texts

SOURCE_TOKENIZER, TARGET_TOKENIZER = "tokenizer-source.json", "tokenizer-target.json"
OUTPUTS = "translations.jsonl"
"""Latest translations of the validation set: source, expected, translated."""
LARGE = 256
"""Width of the model from which bf16 is faster than float32 on a CPU (measured)."""


def train_translation(options: TranslationOptions) -> None:
    """Runs one training; called on every rank."""
    data = load_pairs(options)
    options = common.with_fast_dtype(options, options.dimensions()[0] >= LARGE)
    with common.join("translation", options) as session:
        session.agree("the corpus", data.fingerprint)
        common.agree_on_precision(session, options)
        tokenizers = make_tokenizers(session, data, options)
        limit = options.seq_len
        training = sentences(data.splits["train"], tokenizers, limit, options.too_long)
        watched = data.splits[data.held_out]
        held_out = sentences(watched, tokenizers, limit, "cut")
        session.say(describe_data(data, training, held_out, tokenizers))

        batching, lengths = common.make_batching(session, options), training.lengths()
        loader = common.make_loader(session, options, training, batching, lengths)

        sizes = len(tokenizers[0]), len(tokenizers[1])
        pre_norm = options.norm == "pre"
        shape = Shape(*sizes, *options.dimensions(), pre_norm, options.dropout)
        network = session.place(Transformer(shape), shard=options.shard)
        optimizer = make_optimizer(options, network, batching.lr)
        curve = common.make_curve(options, loader)
        schedule = LambdaLR(optimizer, curve)
        model = common.prepare(session, options, network, optimizer, schedule)

        # Dividing by the mean length of the data set gives every token the same weight, without
        # ranks exchanging how many tokens they have.
        mean_length = sum(len(row) + 1 for row in training.target) / len(training)

        def compute(batch: train.Batch) -> tuple[Tensor, dict[str, Tensor]]:
            source, target, expected = batch
            with session.autocast():
                outputs = model(source, target)
                losses = token_losses(outputs, expected, options.label_smoothing)
            return losses.sum(1) / mean_length, {}

        if common.run_trials(session, options, loader, compute, lengths):
            return
        search = Search(START_ID, END_ID, limit, options.beam)
        final_epoch = -(-curve.steps // len(loader)) - 1
        best = Best(patience=options.patience)
        metadata = describe(options, data, shape)
        common.configure_checkpoints(
            session, options, best, data.fingerprint, metadata, shape=shape,
            tokenizer=options.tokenizer,
        )  # fmt: skip
        figures: dict[str, float] = {}
        for epoch in common.epochs(session, loader, options, curve, schedule, best):
            for batch in loader:
                losses, values = compute(batch)
                session.step(losses, **values)
            with session.averaged():
                figures = evaluate(session, network, held_out)
                if epoch == final_epoch or epoch % options.score_every == options.score_every - 1:
                    figures |= score(session, network, watched, tokenizers, search, options.samples)
                    best.update(figures["bleu"] + figures["chrf"], session.progress.step)
            session.log(data.held_out, samples=len(watched), **figures)
            curve.report(figures["loss"])
            common.stop_early(session, options, best, "BLEU", figures.get("bleu", 0.0))

        if "bleu" not in figures:  # a finished training was resumed
            with session.averaged():
                figures = evaluate(session, network, held_out)
                figures |= score(session, network, watched, tokenizers, search, options.samples)
        measured = {"samples": len(watched), **figures}
        session.save_model({**metadata, "metrics": {data.held_out: measured}}, average=True)
        session.say(f"{summary(figures)}  ({len(watched)} {data.held_out} sentences)")


def token_losses(outputs: Tensor, expected: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the loss of each token, shape ``[n, t]``; 0 for padding."""
    if outputs.dtype in (torch.bfloat16, torch.float16):
        outputs = outputs.float()
    losses = cross_entropy(
        outputs.flatten(0, 1),
        expected.flatten(),
        ignore_index=PAD_ID,
        reduction="none",
        label_smoothing=smoothing,
    )
    return losses.view_as(expected)


@torch.inference_mode()
def evaluate(
    session: train.Session, network: Transformer | torch.nn.Module, held_out: Sentences
) -> dict[str, float]:
    """Returns loss per token and perplexity over every sentence once, equal on every rank."""
    session.phase("evaluate")
    network.eval()
    meter = session.meter()
    for batch in session.shard(held_out, 128):
        source, target, expected = batch
        with session.autocast():
            losses = token_losses(network(source, target), expected)
        meter.add(batch.count, loss=losses.sum(1), tokens=(expected != PAD_ID).sum(1))
    network.train()
    sums = meter.result().sums
    loss = sums["loss"] / sums["tokens"]
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def translate(
    session: train.Session,
    network: torch.nn.Module,
    rows: list[list[int]],
    tokenizer: Tokenizer,
    search: Search,
) -> list[str]:
    """Translates all rows, each on one rank, and returns all translations on every rank."""
    session.phase("translate")
    network.eval()
    order = balanced_order([len(row) for row in rows], session.world.size)
    translated: list[tuple[int, str]] = []
    for batch in session.shard(Sources(rows, order), 64):
        with session.autocast():
            rows_out = decode(network, batch.data[0], search)[: batch.count]
        numbers = [order[place] for place in batch.ids.tolist()[: batch.count]]
        translated += zip(numbers, tokenizer.decode(rows_out), strict=True)
    network.train()
    parts = session.comms.texts(json.dumps(translated))
    shape = list_of(tuple_of(integer(0, len(rows) - 1), text(MAX_LONG_TEXT)), len(rows))
    by_number = dict(pair for part in parse_texts(parts, shape) for pair in part)
    return [by_number[number] for number in range(len(rows))]


def balanced_order(lengths: Sequence[int], ranks: int) -> list[int]:
    """Orders sample ids so that equal contiguous shares hold equal work, longest first."""
    ids = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    return [int(number) for rank in range(ranks) for number in ids[rank::ranks]]


def score(
    session: train.Session,
    network: torch.nn.Module,
    pairs: Sequence[Pair],
    tokenizers: tuple[Tokenizer, Tokenizer],
    search: Search,
    samples: int,
) -> dict[str, float]:
    """Translates all pairs and returns BLEU and other scores; shows some translations."""
    rows = source_rows(tokenizers[0], [source for source, _ in pairs], search.limit)
    outputs = translate(session, network, rows, tokenizers[1], search)
    show(session, pairs, outputs, samples)
    return translation_scores(outputs, [target for _, target in pairs])


def summary(figures: dict[str, float]) -> str:
    """Formats the scores of translations in one line."""
    return (
        f"bleu {figures['bleu']:.2f}  chrf {figures['chrf']:.2f}  cer {figures['cer']:.4f}"
        f"  wer {figures['wer']:.4f}  exact {figures['exact']:.4f}"
    )


def show(
    session: train.Session, pairs: Sequence[Pair], outputs: Sequence[str], samples: int
) -> None:
    """Saves all translations with the run, and shows some."""
    records = [
        {"source": source, "expected": target, "translated": output}
        for (source, target), output in zip(pairs, outputs, strict=True)
    ]
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    session.keep(OUTPUTS, lambda folder: files.write_bytes(folder / OUTPUTS, content.encode()))
    for record in records[:samples]:
        session.say("\n".join(f"  {name:<10} {value}" for name, value in record.items()))


def make_tokenizers(
    session: train.Session, data: PairData, options: TranslationOptions
) -> tuple[Tokenizer, Tokenizer]:
    """Trains both tokenizers on rank 0, saves them with the run, and returns them on all ranks."""

    def make() -> str:
        sides = zip(*data.splits["train"], strict=True)
        size, min_frequency = options.vocab_size, options.min_frequency
        contents = [
            train_tokenizer(options.tokenizer, side, size, min_frequency).to_json()
            for side in sides
        ]
        return json.dumps(contents)

    def write(folder: Path) -> None:
        for name, content in zip((SOURCE_TOKENIZER, TARGET_TOKENIZER), tokenizers, strict=True):
            files.write_bytes(folder / rundir.MODEL / name, content.encode())

    tokenizers = source, target = json.loads(session.comms.by_first(make))
    session.keep(rundir.MODEL, write)
    return from_json(source), from_json(target)


def describe_data(
    data: PairData, training: Sentences, held_out: Sentences, both: tuple[Tokenizer, Tokenizer]
) -> str:
    """Describes sizes of the data and dropped pairs in one line."""
    dropped = [f"{training.num_dropped} too long"] if training.num_dropped else []
    dropped += [f"{data.skipped} with an empty side"] if data.skipped else []
    return (
        f"{len(training)} pairs to train on, {len(held_out)} to validate"
        f"{', left out: ' + ', '.join(dropped) if dropped else ''};"
        f" vocabularies of {len(both[0])} and {len(both[1])} tokens"
    )


def describe(options: TranslationOptions, data: PairData, shape: Shape) -> dict[str, Any]:
    """Describes the model and its data, for its use and for the record."""
    return {
        "format": 1,
        "task": "translation",
        "shape": asdict(shape),
        "tokenizer": options.tokenizer,
        "languages": [options.source_lang, options.target_lang],
        "seq_len": options.seq_len,
        "beam": options.beam,
        "data": {
            "source": data.source,
            "target": options.target,
            "config": options.data_config,
            "fingerprint": data.fingerprint,
            "split": data.split,
            "sizes": {name: len(pairs) for name, pairs in data.splits.items()},
        },
        "seed": options.seed,
        "number_format": options.dtype,
    }


main = partial(common.run, "translation", train_translation)


if __name__ == "__main__":
    sys.exit(main())
