"""Translate: a whole training in one file, to be read from top to bottom and changed.

    paceline run my_translation.py                        # here: numbers to their English words
    paceline run -H n1,n2 my_translation.py --data x.tsv  # on two hosts, with the same result
    paceline run --run-dir runs/mine my_translation.py    # typed again, it resumes where it was
    python my_translation.py --evaluate runs/mine         # the figures of a run's model

--data names a file of lines: source, tab, target. Every tenth line is held out.
"""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.recipes.data.pairs import numbers

BATCH = 64  # pairs of one step over all processes: the result is the same at any number of them
MAX_TOKENS = 64  # tokens of a sentence that are used
PAD, UNKNOWN, START, END = range(4)
Pair = tuple[Tensor, Tensor]  # token ids of source and target, both with START and END


def tokenized(texts: Iterable[str]) -> tuple[list[Tensor], int]:
    """Token ids of each text (words, single digits, punctuation), and the vocabulary's size."""
    split = [re.findall(r"\d|[^\W\d]+|[^\w\s]", text)[: MAX_TOKENS - 2] for text in texts]
    seen = Counter(token for n, text in enumerate(split) if n % 10 for token in text)
    number = {token: n for n, (token, _) in enumerate(seen.most_common(30_000), start=4)}
    rows = [[START, *(number.get(token, UNKNOWN) for token in text), END] for text in split]
    return [torch.tensor(row) for row in rows], len(number) + 4


def pad(pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """Source ``[n, s]`` and target ``[n, t]``."""
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    return pad_sequence(sources, batch_first=True), pad_sequence(targets, batch_first=True)


class Network(nn.Module):
    """torch's transformer between two embeddings and a linear layer.

    Without dropout, which depends on how a batch is shared among processes.
    """

    def __init__(self, source: int, target: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source, width), nn.Embedding(target, width)
        self.places = nn.Embedding(MAX_TOKENS, width)
        warnings.filterwarnings("ignore", message="enable_nested_tensor")  # of no use to training
        self.transformer = nn.Transformer(
            width, 4, layers, layers, 4 * width, 0.0, batch_first=True, norm_first=True
        )
        self.words = nn.Linear(width, target)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the token after each one of ``target``, ``[n, t, tokens]``."""
        length = target.shape[1]
        causal_mask = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        vectors = self.transformer(
            self.source(source) + self.places.weight[: source.shape[1]],
            self.target(target) + self.places.weight[:length],
            tgt_mask=causal_mask,
            src_key_padding_mask=source == PAD,
            memory_key_padding_mask=source == PAD,
        )
        scores: Tensor = self.words(vectors)
        return scores


def token_losses(scores: Tensor, target: Tensor) -> Tensor:
    """Loss of each token of ``target`` after the first, ``[n, t - 1]``; 0 for padding."""
    return cross_entropy(scores.transpose(1, 2), target[:, 1:], ignore_index=PAD, reduction="none")


@torch.inference_mode()
def evaluate(session: train.Session, network: nn.Module, data: list[Pair]) -> dict[str, float]:
    """Mean loss of a sentence, and the part that is translated word for word."""
    network.eval()
    meter = session.meter()
    for batch in session.shard(data, 256, collate=pad):
        source, target = batch
        output = torch.full_like(target[:, :1], START)
        with session.autocast():
            losses = token_losses(network(source, target[:, :-1]), target)
            while output.shape[1] < target.shape[1]:  # greedily, up to the expected length
                output = torch.cat((output, network(source, output)[:, -1:].argmax(2)), 1)
        exact = ((output == target) | (target == PAD)).all(1)
        meter.add(batch.count, loss=losses.sum(1), exact=exact)
    network.train()
    return meter.result().values()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a translation transformer.")
    parser.add_argument("--data", default="numbers", metavar="FILE.tsv", help="source, tab, target")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training data")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--evaluate", type=Path, metavar="RUN", help="only evaluate RUN's model")
    options = parser.parse_args()
    pairs = numbers(seed=0)
    if options.data != "numbers":
        lines = Path(options.data).read_text(encoding="utf-8").splitlines()
        pairs = [(line.split("\t")[0], line.split("\t")[1]) for line in lines]
    sources, source_tokens = tokenized(source for source, _ in pairs)
    targets, target_tokens = tokenized(target for _, target in pairs)
    both = list(zip(sources, targets, strict=True))
    training, held_out = [pair for n, pair in enumerate(both) if n % 10], both[::10]

    # dtype: bf16 and fp16 compute in it and keep float32 parameters
    with train.join("my-pairs", seed=0, dtype="float32", quiet=bool(options.evaluate)) as session:
        network = session.place(Network(source_tokens, target_tokens))
        if options.evaluate:
            train.load_weights(options.evaluate, network)
            session.say(f"{evaluate(session, network, held_out)}")
            return
        lengths = [len(source) + len(target) for source, target in training]
        loader = session.loader(training, BATCH, lengths=lengths, collate=pad, workers=0)
        steps = options.epochs * len(loader)
        optimizer = AdamW(network.parameters(), options.lr)
        schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
        model = session.prepare(network, optimizer, schedule, clip_norm=1.0)
        best = train.Best()
        session.checkpoints(best=best)
        for _ in session.epochs(loader, options.epochs):
            for source, target in loader:
                with session.autocast():
                    losses = token_losses(model(source, target[:, :-1]), target)
                session.step(losses.sum(1))
            figures = evaluate(session, network, held_out)
            session.log("test", **figures)
            best.update(figures["exact"], session.progress.step)
        session.save_model({"source_tokens": source_tokens, "target_tokens": target_tokens})
        session.say(f"best: {best.value:.1%} word for word, at step {best.step}")


if __name__ == "__main__":
    main()
