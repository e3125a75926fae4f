"""Train a language model: a whole training in one file, to be read from top to bottom and changed.

    paceline run my_language.py                              # here, on generated restaurant reviews
    paceline run -H n1,n2 my_language.py --data book.txt     # on two hosts, with the same result
    paceline run --run-dir runs/mine my_language.py          # typed again, it resumes where it was
    python my_language.py --evaluate runs/mine               # the figures of a run's model

The model reads and writes bytes, so it needs no tokenizer. The last tenth of the text is held out.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.recipes.data.texts import meals

BATCH = 16  # rows of one step over all processes: the result is the same at any number of them
LENGTH = 128  # bytes that the model reads at once
DEPTH, WIDTH, HEADS = 2, 128, 4


def read(path: str) -> Tensor:
    """Rows of a text, each with the byte that follows it, shape ``[n, LENGTH + 1]``."""
    text = "\n".join(text for _, text in meals(seed=0))
    content = text.encode() if path == "meals" else Path(path).read_bytes()
    stream = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    return stream.unfold(0, LENGTH + 1, LENGTH)


class Layer(nn.Module):
    """Attention to earlier bytes with rotary positions, and a feed-forward layer with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        q, k = (rotate(part, angles) for part in (q, k))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        y = self.second_norm(x)
        output: Tensor = x + self.down(silu(self.gate(y)) * self.up(y))
        return output


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns pairs of features by the angle of their place."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Network(nn.Module):
    """Scores of the next byte, shape ``[rows, length, 256]``."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256)
        half = WIDTH // HEADS // 2
        speeds = 1e4 ** (-torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(LENGTH)[:, None] * speeds, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens)
        for layer in self.layers:
            x = layer(x, self.angles[: tokens.shape[1]])
        scores: Tensor = self.head(self.norm(x))
        return scores


def bits(network: nn.Module, rows: Tensor) -> Tensor:
    """Mean number of bits for each byte of a row, shape ``[n]``."""
    scores, labels = network(rows[:, :-1]), rows[:, 1:]
    losses = cross_entropy(scores.transpose(1, 2), labels, reduction="none")
    return losses.mean(1) / math.log(2)


@torch.inference_mode()
def evaluate(session: train.Session, network: nn.Module, data: list[Tensor]) -> dict[str, float]:
    """Bits per byte over every row exactly once, the same on every process."""
    network.eval()
    meter = session.meter()
    for batch in session.shard(data, 64, collate=torch.stack):
        (rows,) = batch
        with session.autocast():
            meter.add(batch.count, bits_per_byte=bits(network, rows))
    network.train()
    return meter.result().values()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a language model of bytes.")
    parser.add_argument("--data", default="meals", metavar="FILE.txt", help="any text")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training data")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--evaluate", type=Path, metavar="RUN", help="only evaluate RUN's model")
    options = parser.parse_args()
    rows = [*read(options.data)]
    held_out, training = rows[-len(rows) // 10 :], rows[: -len(rows) // 10]

    # dtype: bf16 and fp16 compute in it and keep float32 parameters
    with train.join(
        "my-language", seed=0, dtype="float32", quiet=bool(options.evaluate)
    ) as session:
        network = session.place(Network())
        if options.evaluate:
            train.load_weights(options.evaluate, network)
            session.say(f"{evaluate(session, network, held_out)}")
            return
        loader = session.loader(training, BATCH, collate=torch.stack, workers=0)
        steps = options.epochs * len(loader)
        optimizer = AdamW(network.parameters(), options.lr)
        schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
        model = session.prepare(network, optimizer, schedule, clip_norm=1.0)
        best = train.Best(higher=False)
        session.checkpoints(best=best)
        for _ in session.epochs(loader, options.epochs):
            for (batch,) in loader:
                with session.autocast():
                    losses = bits(model, batch)
                session.step(losses)
            figures = evaluate(session, network, held_out)
            session.log("val", **figures)
            best.update(figures["bits_per_byte"], session.progress.step)
        session.save_model({})
        session.say(f"least bits per byte {best.value:.4f}, at step {best.step}")


if __name__ == "__main__":
    main()
