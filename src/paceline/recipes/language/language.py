"""Train a language model from scratch: ``paceline train language``,
``torchrun -m paceline.recipes.language.language``, or alone.

The training is in :func:`train_language`, from top to bottom; its parts are imported. All sizes
follow from ``--depth`` and the data; :func:`derive` says how.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.recipes import common
from paceline.recipes.language.corpus import Corpus
from paceline.recipes.language.decoder import Decoder, Shape
from paceline.recipes.language.memory import (
    MemoryNeeds,
    check_memory,
    decoder_needs,
    examples_at_once,
)
from paceline.recipes.language.muon import MuonWithAuxiliary
from paceline.recipes.language.options import LanguageOptions
from paceline.recipes.language.rows import IGNORED, MICRO_BATCH_TOKENS, with_micro_batch
from paceline.recipes.language.token_files import (
    END,
    END_TOKEN,
    TokenFiles,
    TokenRows,
    token_folder,
    write_tokens,
)
from paceline.recipes.optimization import make_optimizer
from paceline.recipes.tokens import TOKENIZER
from paceline.spec import rundir
from paceline.spec.formatting import pluralize
from paceline.spec.schema import integer, text, tuple_of
from paceline.train import Best, files
from paceline.train.comms import parse_texts

_CORPUS_SCHEMA = tuple_of(text(), text(), integer())  # host, hash, length


def train_language(options: LanguageOptions) -> None:
    """Runs one training; called on every rank."""
    corpus = Corpus(options, reads=False)
    options = common.with_fast_dtype(options, large=True)
    with common.join("language", options) as session:
        read_once_per_host(session, corpus)
        session.agree("the data set", corpus.fingerprint)
        common.agree_on_precision(session, options)
        session.say(describe_corpus(corpus))

        # Tokens: the first process of each disk makes them, and later trainings find them.
        vocabulary = options.vocab_size or min(1024 * options.depth, 32_768)
        folder = token_folder(corpus, vocabulary)
        session.phase("make tokens")
        session.once(folder, partial(write_tokens, corpus, vocabulary))
        tokens = session.together(lambda: TokenFiles.open(folder, vocabulary))
        session.agree("the content of the tokens", tokens.content)
        tokenizer = tokens.tokenizer()
        session.keep(rundir.MODEL, partial(save_tokenizer, tokens, options.max_length))
        training, held_out = session.together(
            lambda: (
                tokens.rows("train", options.max_length),
                tokens.rows(corpus.held_out, options.max_length),
            )
        )

        # The network, and what follows from it and from the data.
        shape = Shape(options.depth, len(tokenizer), options.max_length)
        options = derive(options, shape, training, held_out)
        session.say(describe_training(options, shape, training))
        batching = common.make_batching(session, options)
        muon_parameters = shape.parameters - shape.vocabulary * shape.width if options.muon else 0
        needs = decoder_needs(shape, muon_parameters)
        needs = replace(needs, examples=examples_at_once(options, batching))
        check_memory(session, needs, {f"--max-length {shape.length // 2}": half_length})
        loader = common.make_loader(session, options, training, batching)
        decoder = Decoder(shape)
        network = session.place(decoder, shard=options.shard)
        matrices = decoder.matrices() if options.muon else []
        optimizer = make_optimizer(options, network, batching.lr, excluded=matrices)
        if options.muon:
            optimizer = MuonWithAuxiliary(matrices, optimizer)
        curve = common.make_curve(options, loader)
        schedule = LambdaLR(optimizer, curve)
        model = common.prepare(session, options, network, optimizer, schedule)

        def compute(batch: train.Batch) -> tuple[Tensor, dict[str, Tensor]]:
            inputs, labels = batch
            with session.autocast():
                scores = model(inputs)
            return row_losses(scores, labels) / options.max_length, {}

        if common.run_trials(session, options, loader, compute):
            return
        best = Best(higher=False, patience=options.patience)
        metadata = describe(options, corpus, tokens, shape)
        common.configure_checkpoints(
            session, options, best, tokens.content, metadata,
            depth=options.depth, length=options.max_length, muon=options.muon,
        )  # fmt: skip
        figures: dict[str, float] = {}
        for _ in common.epochs(session, loader, options, curve, schedule, best):
            for batch in loader:
                losses, values = compute(batch)
                session.step(losses, **values)
            with session.averaged():
                figures = evaluate(session, network, held_out)
            session.log(corpus.held_out, samples=len(held_out), **figures)
            best.update(figures["bits_per_byte"], session.progress.step)
            curve.report(figures["loss"])
            value = figures["bits_per_byte"]
            common.stop_early(session, options, best, "number of bits per byte", value)

        with session.averaged():  # a resumed run that had finished has no evaluation yet
            figures = figures or evaluate(session, network, held_out)
        measured = {"samples": len(held_out), **figures}
        session.save_model({**metadata, "metrics": {corpus.held_out: measured}}, average=True)
        session.say(summary(figures, held_out))


def read_once_per_host(session: train.Session, corpus: Corpus) -> None:
    """Lets one process of each host read all of a corpus; the others take its hash and length."""
    session.phase("read the data")
    world = session.world
    session.together(lambda: corpus.read() if world.local_rank == 0 else None)
    report = json.dumps([world.host, corpus.fingerprint, corpus.num_characters])
    for host, fingerprint, count in parse_texts(session.comms.texts(report), _CORPUS_SCHEMA):
        if host == world.host and fingerprint:
            corpus.fingerprint, corpus.num_characters = fingerprint, count
    if not corpus.fingerprint:  # this process joins a running job without its host's first one
        corpus.read()


def half_length(needs: MemoryNeeds) -> MemoryNeeds:
    """Returns the needs of rows with half the tokens."""
    return replace(needs, length=needs.length / 2, longest=needs.longest // 2)


def derive(
    options: LanguageOptions, shape: Shape, training: TokenRows, held_out: TokenRows
) -> LanguageOptions:
    """Returns the options with a value for each that is left to the recipe.

    They depend on network and data, but not on the number of processes.
    """
    # Length. Twenty tokens for each parameter give the lowest loss for the arithmetic that is spent
    # (Hoffmann et al. 2022). Up to four passes through the same text teach as much as new text;
    # many more teach little (Muennighoff et al. 2023).
    passes = 20 * shape.parameters / training.num_targets
    epochs = options.epochs or min(max(math.ceil(passes), 1), 4)

    # Arithmetic: each parameter takes part in a multiplication and an addition for each token in
    # the forward pass, and in twice as many in the backward pass.
    operations = 6 * shape.parameters * training.num_targets * epochs

    # Batch and learning rate, by fits over trainings of many sizes (DeepSeek-AI 2024): a longer
    # training has smaller gradients beside their noise, so it needs larger batches and smaller
    # steps. The batch is a power of two, which most numbers of processes can share evenly.
    batch_tokens = 0.292 * operations**0.3271
    rows = 2 ** max(0, round(math.log2(batch_tokens / options.max_length)))
    lr = options.lr or 0.3118 * operations**-0.125

    # Evaluations. A token costs a third there, without a backward pass. With a twentieth of the
    # time for them, so many fit into the training, but never more than fifty.
    global_batch = options.global_batch or min(rows, len(training))
    steps = options.steps or epochs * -(-len(training) // global_batch)
    share = 0.05 * 3 * steps * global_batch / len(held_out)
    return replace(
        with_micro_batch(options, options.max_length),
        epochs=epochs,
        global_batch=global_batch,
        lr=lr,
        evaluate_every=options.evaluate_every or math.ceil(steps / min(max(share, 1), 50)),
    )


def row_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of each row, summed over its tokens, in nats, shape ``[rows]``.

    Args:
        scores: Shape ``[rows, length, vocabulary]``.
        labels: The tokens to predict, or ``IGNORED``, shape ``[rows, length]``.
    """
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    losses = cross_entropy(
        scores.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.view(labels.shape).sum(1)


@torch.no_grad()
def evaluate(session: train.Session, network: nn.Module, held_out: TokenRows) -> dict[str, float]:
    """Returns loss per token, perplexity and bits per byte of a text, on every rank.

    Bits per byte do not depend on the tokenizer: they are what a program would need for each byte
    of the text if it compressed it with this model.
    """
    session.phase("evaluate")
    network.eval()
    meter = session.meter()
    for batch in session.shard(held_out, max(1, MICRO_BATCH_TOKENS // held_out.length)):
        inputs, labels = batch
        with session.autocast():
            scores = network(inputs)
        meter.add(batch.count, loss=row_losses(scores, labels))
    network.train()
    nats = meter.result().sums["loss"]
    loss = nats / held_out.num_targets
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / math.log(2) / held_out.num_bytes,
    }


def summary(figures: dict[str, float], held_out: TokenRows) -> str:
    """Formats the figures of an evaluation in one line."""
    return (
        f"bits per byte {figures['bits_per_byte']:.4f}  perplexity {figures['perplexity']:.2f}"
        f"  ({held_out.num_bytes:,} held-out bytes)"
    )


def describe_corpus(corpus: Corpus) -> str:
    """Describes the data in a line."""
    skipped = corpus.describe_skipped()
    return f"{corpus.source}: {corpus.num_characters:,} characters{skipped and f'; {skipped}'}"


def describe_training(options: LanguageOptions, shape: Shape, training: TokenRows) -> str:
    """Describes network and length of the training in a line."""
    tokens = options.epochs * training.num_targets
    if options.steps:
        tokens = options.steps * options.global_batch * options.max_length
    return (
        f"{pluralize(shape.depth, 'layer')} of width {shape.width} with"
        f" {pluralize(shape.heads, 'head')}, {shape.groups} of keys and values,"
        f" {shape.vocabulary:,} tokens: {shape.parameters:,} parameters;"
        f" {training.num_targets:,} tokens of"
        f" {training.num_bytes / max(1, training.num_targets):.2f} bytes, {tokens:,} in the"
        f" training, {tokens / shape.parameters:.1f} for each parameter"
    )


def save_tokenizer(tokens: TokenFiles, length: int, run: Path) -> None:
    """Saves the tokenizer with a run, in the form of transformers."""
    folder = run / rundir.MODEL
    files.write_bytes(folder / TOKENIZER, files.read_bytes_limited(tokens.folder / TOKENIZER))
    files.write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": length,
        },
    )


def describe(
    options: LanguageOptions, corpus: Corpus, tokens: TokenFiles, shape: Shape
) -> dict[str, Any]:
    """Describes model and data, for use here and in transformers, and for the record."""
    return {
        "format": 1,
        "task": "language",
        "depth": shape.depth,
        "max_length": shape.length,
        "data": {
            "source": corpus.source,
            "test": options.test_data,
            "config": options.data_config,
            "column": options.text_column,
            "fingerprint": corpus.fingerprint,
            "split": corpus.split,
            "sizes": tokens.num_bytes,
        },
        "seed": options.seed,
        "number_format": options.dtype,
        **shape.config(END_TOKEN),
    }


main = partial(common.run, "language", train_language)


if __name__ == "__main__":
    sys.exit(main())
