"""Networks by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A small convolutional network for images from 8×8 upwards.

    Halves the image until it is at most 7 pixels wide. It has neither batch normalisation nor
    dropout: both make the result depend on how a batch is shared among processes.

    Args:
        shape: (channels, height, width) of an image.
        classes: Number of outputs.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    out = 16
    while max(height, width) > 7 or len(layers) < 4:
        pool = nn.MaxPool2d(2) if max(height, width) > 7 else nn.Identity()
        layers += [nn.Conv2d(channels, out, 3, padding=1), pool, nn.ReLU()]
        if not isinstance(pool, nn.Identity):
            height, width = max(height // 2, 1), max(width // 2, 1)
        channels, out = out, min(2 * out, 64)
    hidden = [nn.Flatten(), nn.Linear(channels * height * width, 64), nn.ReLU()]
    return nn.Sequential(*layers, *hidden, nn.Linear(64, classes))


MODELS: dict[str, Callable[[tuple[int, int, int], int], nn.Module]] = {"cnn": cnn}
