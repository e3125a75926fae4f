"""Classify images: a whole training in one file, to be read from top to bottom and changed.

    paceline run my_image.py                              # here, on the bundled digits
    paceline run -H n1,n2 my_image.py --epochs 20         # on two hosts, with the same result
    paceline run --run-dir runs/mine my_image.py          # typed again, it resumes where it was
    python my_image.py --evaluate runs/mine               # the figures of a run's model

--data names a folder with the four files of MNIST or its likes: train-images-idx3-ubyte.gz, …
"""

from __future__ import annotations

import argparse
import gzip
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from paceline import train

DIGITS = Path(train.__file__).parents[1] / "recipes/data/digits"
MAX_BYTES = 1 << 30  # a small packed file may stand for any size
BATCH = 64  # samples of one step over all processes: the result is the same at any number of them


def read(folder: Path, part: str) -> TensorDataset:
    """Images ``[n, 1, height, width]``, as bytes, and labels ``[n]``."""

    def array(name: str) -> Tensor:
        with gzip.open(folder / f"{part}-{name}-ubyte.gz") as file:
            content = bytearray(file.read(MAX_BYTES))
        count = content[3]  # of dimensions; their sizes follow, then the bytes
        sizes = [int.from_bytes(content[n : n + 4], "big") for n in range(4, 4 + 4 * count, 4)]
        return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * count).view(sizes)

    return TensorDataset(array("images-idx3")[:, None], array("labels-idx1").long())


class Network(nn.Module):
    """Two convolutions and two linear layers.

    Without batch normalisation and dropout, which depend on how a batch is shared among processes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        scaled = images.to(self.head.weight.dtype) / 255
        scores: Tensor = self.head(self.features(scaled))
        return scores


@torch.inference_mode()
def evaluate(session: train.Session, network: nn.Module, data: TensorDataset) -> dict[str, float]:
    """Mean loss and accuracy over every image exactly once, the same on every process."""
    network.eval()
    meter = session.meter()
    for batch in session.shard(data):
        images, labels = batch
        with session.autocast():
            scores = network(images)
        losses = cross_entropy(scores, labels, reduction="none")
        meter.add(batch.count, loss=losses, accuracy=scores.argmax(1) == labels)
    network.train()
    return meter.result().values()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an image classifier.")
    parser.add_argument("--data", type=Path, default=DIGITS, help="folder with four IDX files")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training data")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--evaluate", type=Path, metavar="RUN", help="only evaluate RUN's model")
    options = parser.parse_args()
    training, held_out = read(options.data, "train"), read(options.data, "t10k")
    classes = int(training.tensors[1].max()) + 1

    # dtype: bf16 and fp16 compute in it and keep float32 parameters
    with train.join("my-image", seed=0, dtype="float32", quiet=bool(options.evaluate)) as session:
        network = session.place(Network(classes))
        if options.evaluate:
            train.load_weights(options.evaluate, network)
            session.say(f"{evaluate(session, network, held_out)}")
            return
        loader = session.loader(training, BATCH)
        steps = options.epochs * len(loader)
        optimizer = AdamW(network.parameters(), options.lr)
        schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
        model = session.prepare(network, optimizer, schedule)
        best = train.Best()
        session.checkpoints(best=best)
        for _ in session.epochs(loader, options.epochs):
            for images, labels in loader:
                with session.autocast():
                    scores = model(images)
                    losses = cross_entropy(scores, labels, reduction="none")
                session.step(losses, accuracy=scores.argmax(1) == labels)
            figures = evaluate(session, network, held_out)
            session.log("test", **figures)
            best.update(figures["accuracy"], session.progress.step)
        session.save_model({"classes": classes})
        session.say(f"best accuracy {best.value:.4f}, at step {best.step}")


if __name__ == "__main__":
    main()
