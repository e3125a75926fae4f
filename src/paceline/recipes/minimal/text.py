"""Classify texts: a whole training in one file, to be read from top to bottom and changed.

    paceline run my_text.py                               # here, on generated restaurant reviews
    paceline run -H n1,n2 my_text.py --data reviews.csv   # on two hosts, with the same result
    paceline run --run-dir runs/mine my_text.py           # typed again, it resumes where it was
    python my_text.py --evaluate runs/mine                # the figures of a run's model

--data names a csv file: label, text; or columns under a header with usual names. Every tenth row is
held out.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.recipes.data.texts import meals, select_columns

BATCH = 32  # texts of one step over all processes: the result is the same at any number of them
MAX_TOKENS = 128  # tokens of a text that are used
PAD, UNKNOWN = 0, 1
Sample = tuple[Tensor, int]  # token ids of a text, and the number of its class


def read(path: str) -> tuple[list[Sample], list[str], list[str]]:
    """Every text as token ids; the words that these stand for, and the classes' labels."""
    rows = meals(seed=0)
    if path != "meals":
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        table = [row for row in csv.reader(lines, skipinitialspace=True) if any(row)]
        if all(columns := select_columns(table[0])):  # the first row is a header
            places = [table[0].index(name) for name in columns]
            table = [[row[place] for place in places] for row in table[1:]]
        rows = [(label, text) for label, text in table]
    texts = [re.findall(r"\w+|[^\w\s]", text.lower())[:MAX_TOKENS] for _, text in rows]
    seen = Counter(word for n, text in enumerate(texts) if n % 10 for word in text)
    words = ["[PAD]", "[UNKNOWN]", *(word for word, _ in seen.most_common(30_000))]
    labels = sorted({label for label, _ in rows})
    number = {word: n for n, word in enumerate(words)}
    ids = [[number.get(word, UNKNOWN) for word in text] or [UNKNOWN] for text in texts]
    classes = [labels.index(label) for label, _ in rows]
    return list(zip(map(torch.tensor, ids), classes, strict=True)), words, labels


def pad(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Token ids ``[n, longest]`` and classes ``[n]``."""
    ids = pad_sequence([ids for ids, _ in samples], batch_first=True, padding_value=PAD)
    return ids, torch.tensor([number for _, number in samples])


class Network(nn.Module):
    """A transformer encoder, averaged over a text.

    Without dropout, which depends on how a batch is shared among processes.
    """

    def __init__(self, tokens: int, classes: int, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(MAX_TOKENS, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == PAD
        vectors = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        vectors = self.encoder(vectors, src_key_padding_mask=padding)
        real = (~padding)[:, :, None]
        scores: Tensor = self.head((vectors * real).sum(1) / real.sum(1))
        return scores


@torch.inference_mode()
def evaluate(session: train.Session, network: nn.Module, data: list[Sample]) -> dict[str, float]:
    """Mean loss and accuracy over every text exactly once, the same on every process."""
    network.eval()
    meter = session.meter()
    for batch in session.shard(data, 128, collate=pad):
        ids, classes = batch
        with session.autocast():
            scores = network(ids)
        losses = cross_entropy(scores, classes, reduction="none")
        meter.add(batch.count, loss=losses, accuracy=scores.argmax(1) == classes)
    network.train()
    return meter.result().values()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a text classifier.")
    parser.add_argument("--data", default="meals", metavar="FILE.csv", help="label, text")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training data")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--evaluate", type=Path, metavar="RUN", help="only evaluate RUN's model")
    options = parser.parse_args()
    samples, words, labels = read(options.data)
    training, held_out = [s for n, s in enumerate(samples) if n % 10], samples[::10]

    # dtype: bf16 and fp16 compute in it and keep float32 parameters
    with train.join("my-text", seed=0, dtype="float32", quiet=bool(options.evaluate)) as session:
        network = session.place(Network(len(words), len(labels)))
        if options.evaluate:
            train.load_weights(options.evaluate, network)
            session.say(f"{evaluate(session, network, held_out)}")
            return
        lengths = [len(ids) for ids, _ in training]
        loader = session.loader(training, BATCH, lengths=lengths, collate=pad, workers=0)
        steps = options.epochs * len(loader)
        optimizer = AdamW(network.parameters(), options.lr)
        schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
        model = session.prepare(network, optimizer, schedule, clip_norm=1.0)
        best = train.Best()
        session.checkpoints(best=best)
        for _ in session.epochs(loader, options.epochs):
            for ids, classes in loader:
                with session.autocast():
                    scores = model(ids)
                    losses = cross_entropy(scores, classes, reduction="none")
                session.step(losses, accuracy=scores.argmax(1) == classes)
            figures = evaluate(session, network, held_out)
            session.log("test", **figures)
            best.update(figures["accuracy"], session.progress.step)
        session.save_model({"labels": labels, "words": words})
        session.say(f"best accuracy {best.value:.4f}, at step {best.step}")


if __name__ == "__main__":
    main()
