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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from paceline import train
from paceline.recipes import common
from paceline.recipes.data.pairs import Pair, PairData, PairRequest, load_pairs
from paceline.recipes.optimization import scheduled
from paceline.recipes.options import TranslationOptions
from paceline.recipes.scores import scores
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
from paceline.spec.shapes import LONG_TEXT, each, row, text, whole
from paceline.train import Best, files
from paceline.train.comms import checked

SOURCE_TOKENIZER, TARGET_TOKENIZER = "tokenizer-source.json", "tokenizer-target.json"
OUTPUTS = "translations.jsonl"
"""The last translation of the whole validation set: source, expected, translated."""
LARGE = 256
"""Width from which bf16 is faster than float32 on a CPU (measured)."""


def train_translation(options: TranslationOptions) -> None:
    """One training, on every rank."""
    data = load_data(options)
    options = common.effective(options, options.dimensions()[0] >= LARGE)
    with common.join("translation", options) as session:
        session.agree("the corpus", data.fingerprint)
        common.agree_format(session, options)
        tokenizers = make_tokenizers(session, data, options)
        limit = options.seq_len
        training = sentences(data.splits["train"], tokenizers, limit, options.too_long)
        watched = data.splits[data.held_out]
        held_out = sentences(watched, tokenizers, limit, "cut")
        session.say(describe_data(data, training, held_out, tokenizers))

        batch, lengths = common.batch_of(session, options), training.lengths()
        loader = common.loader_of(session, options, training, batch, lengths)

        shape = network_shape(options, tokenizers)
        network = session.place(Transformer(shape), shard=options.shard)
        optimizer = common.optimizer_of(options, network, batch.lr)
        curve = common.curve_of(options, loader)
        model = common.prepare(session, options, network, optimizer, scheduled(optimizer, curve))

        # Losses are divided by the mean length, which no rank and no batch changes: every token
        # weighs the same, and ranks need not tell each other how many they have.
        mean_length = sum(len(row) + 1 for row in training.target) / len(training)

        def compute(batch: train.Batch) -> tuple[Tensor, dict[str, Tensor]]:
            source, target, expected = batch
            with session.autocast():
                outputs = model(source, target)
                losses = token_losses(outputs, expected, options.label_smoothing)
            return losses.sum(1) / mean_length, {}

        if common.tried(session, options, loader, compute, lengths):
            return
        search = Search(START_ID, END_ID, limit, options.beam)
        last = -(-curve.steps // len(loader)) - 1
        best = Best(patience=options.patience)
        about = describe(options, data, shape)
        common.keep_checkpoints(session, options, best, data.fingerprint, about, shape=shape)
        figures: dict[str, float] = {}
        for epoch in common.epochs(session, loader, options):
            for given in loader:
                losses, values = compute(given)
                session.step(losses, **values)
            with session.averaged():
                figures = evaluate(session, network, held_out)
                if epoch == last or epoch % options.score_every == options.score_every - 1:
                    figures |= score(session, network, watched, tokenizers, search, options.samples)
                    best.update(figures["bleu"] + figures["chrf"], session.progress.step)
            session.log(data.held_out, samples=len(watched), **figures)
            curve.report(figures["loss"])
            common.end_early(session, options, best, "BLEU", figures.get("bleu", 0.0))

        if "bleu" not in figures:  # a finished training was resumed
            with session.averaged():
                figures = evaluate(session, network, held_out)
                figures |= score(session, network, watched, tokenizers, search, options.samples)
        measured = {"samples": len(watched), **figures}
        session.save_model({**about, "metrics": {data.held_out: measured}}, average=True)
        session.say(f"{summary(figures)}  ({len(watched)} {data.held_out} sentences)")


def token_losses(outputs: Tensor, expected: Tensor, smoothing: float = 0.0) -> Tensor:
    """Loss of each token, shape ``[n, t]``; 0 for padding."""
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
    """Loss of a token and perplexity over every sentence exactly once, the same on every rank."""
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
    """Translations of all rows, each made by one rank, on every rank."""
    session.phase("translate")
    network.eval()
    order = spread([len(row) for row in rows], session.world.size)
    mine: list[tuple[int, str]] = []
    for batch in session.shard(Sources(rows, order), 64):
        with session.autocast():
            found = decode(network, batch.data[0], search)[: batch.count]
        numbers = [order[place] for place in batch.ids.tolist()[: batch.count]]
        mine += zip(numbers, tokenizer.decode(found), strict=True)
    network.train()
    parts = session.comms.texts(json.dumps(mine))
    shape = each(row(whole(0, len(rows) - 1), text(LONG_TEXT)), len(rows))
    everything = dict(pair for part in checked(parts, shape) for pair in part)
    return [everything[number] for number in range(len(rows))]


def spread(lengths: Sequence[int], ranks: int) -> list[int]:
    """Sample ids so ordered that equal contiguous shares hold equal work, longest first."""
    ids = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    return [int(one) for rank in range(ranks) for one in ids[rank::ranks]]


def score(
    session: train.Session,
    network: torch.nn.Module,
    pairs: Sequence[Pair],
    tokenizers: tuple[Tokenizer, Tokenizer],
    search: Search,
    samples: int,
) -> dict[str, float]:
    """BLEU and the others over all pairs; the translations are kept, and some of them shown."""
    rows = source_rows(tokenizers[0], [source for source, _ in pairs], search.limit)
    outputs = translate(session, network, rows, tokenizers[1], search)
    show(session, pairs, outputs, samples)
    return scores(outputs, [target for _, target in pairs])


def summary(figures: dict[str, float]) -> str:
    """The figures of a translation in one line."""
    return (
        f"bleu {figures['bleu']:.2f}  chrf {figures['chrf']:.2f}  cer {figures['cer']:.4f}"
        f"  wer {figures['wer']:.4f}  exact {figures['exact']:.4f}"
    )


def show(
    session: train.Session, pairs: Sequence[Pair], outputs: Sequence[str], samples: int
) -> None:
    """Keeps all translations with the run, and shows some."""
    rows = [(*pair, output) for pair, output in zip(pairs, outputs, strict=True)]

    def write(folder: Path) -> None:
        named = (dict(zip(("source", "expected", "translated"), row, strict=True)) for row in rows)
        lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in named]
        files.write_bytes(folder / OUTPUTS, "".join(lines).encode())

    session.keep(OUTPUTS, write)
    for source, target, output in rows[:samples]:
        session.say(f"  source     {source}\n  expected   {target}\n  translated {output}")


def load_data(options: TranslationOptions) -> PairData:
    """The corpus that the options name."""
    languages = (options.source_lang, options.target_lang)
    return load_pairs(
        PairRequest(
            options.hub(),
            options.target,
            languages,
            options.val_fraction,
            options.seed,
            options.data_dir,
        )
    )


def make_tokenizers(
    session: train.Session, data: PairData, options: TranslationOptions
) -> tuple[Tokenizer, Tokenizer]:
    """Trained once, by rank 0, kept with the run and given to all."""

    def make() -> str:
        sides = zip(*data.splits["train"], strict=True)
        size, least = options.vocab_size, options.min_frequency
        made = [train_tokenizer(options.tokenizer, side, size, least).to_json() for side in sides]
        return json.dumps(made)

    def write(folder: Path) -> None:
        for name, content in zip((SOURCE_TOKENIZER, TARGET_TOKENIZER), made, strict=True):
            files.write_bytes(folder / rundir.MODEL / name, content.encode())

    made = source, target = json.loads(session.comms.by_first(make))
    session.keep(rundir.MODEL, write)
    return from_json(source), from_json(target)


def network_shape(options: TranslationOptions, tokenizers: tuple[Tokenizer, Tokenizer]) -> Shape:
    """The network that the options describe."""
    width, layers, heads, ff = options.dimensions()
    pre_norm = options.norm == "pre"
    sizes = len(tokenizers[0]), len(tokenizers[1])
    return Shape(*sizes, width, layers, heads, ff, pre_norm, options.dropout)


def describe_data(
    data: PairData, training: Sentences, held_out: Sentences, both: tuple[Tokenizer, Tokenizer]
) -> str:
    """One line for people: sizes, and what was left out."""
    left_out = [f"{training.left_out} too long"] if training.left_out else []
    left_out += [f"{data.skipped} with an empty side"] if data.skipped else []
    return (
        f"{len(training)} pairs to train on, {len(held_out)} to validate"
        f"{', left out: ' + ', '.join(left_out) if left_out else ''};"
        f" vocabularies of {len(both[0])} and {len(both[1])} tokens"
    )


def describe(options: TranslationOptions, data: PairData, shape: Shape) -> dict[str, Any]:
    """Everything that is needed to use the model, and where it came from."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe in this process; returns the exit status."""
    return common.run("translation", train_translation, argv)


if __name__ == "__main__":
    sys.exit(main())
