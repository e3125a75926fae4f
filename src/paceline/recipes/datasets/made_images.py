"""Random images, for measuring speed without any file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.datasets.images import ImageData, Labels, Pixels, Request, fingerprint

CLASSES, SIZE, TRAIN, TEST = 1000, 224, 12_800, 1_280
_DIFFERENT = 64  # as many as are made; more would only cost memory


@dataclass(frozen=True)
class Noise:
    """As many images as there are labels; they repeat."""

    made: Pixels
    labels: Labels

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        return self.made[ids % len(self.made)]


def dummy(request: Request) -> ImageData:
    """Colour images of ``request.image_size`` (default 224) in 1000 classes."""
    size = request.image_size or SIZE
    draw = np.random.default_rng(request.seed)
    made = draw.integers(0, 256, (_DIFFERENT, 3, size, size), dtype=np.uint8)
    labels = {"train": np.arange(TRAIN) % CLASSES, "test": np.arange(TEST) % CLASSES}
    return ImageData(
        "dummy",
        tuple(str(number) for number in range(CLASSES)),
        (3, size, size),
        {name: Noise(made, part) for name, part in labels.items()},
        fingerprint([made]),
        {"method": "generated", "seed": request.seed},
    )
