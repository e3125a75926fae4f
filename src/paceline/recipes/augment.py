"""Augmentations, all at once as one affine map of each image.

The numbers come from the sample's place in the data order, so that an image is augmented in the
same way whichever rank gets it, and again after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from paceline.train import Draws

SHIFT = 1 / 8  # of the image's size, at most, by ``crop``
ANGLE = 15.0  # degrees, at most, by ``rotate``
ZOOM = 0.15  # relative, at most, by ``zoom``


AREA = (0.08, 1.0)  # part of the image that ``resized-crop`` takes
ASPECT = (3 / 4, 4 / 3)  # of that part: width over height


def augmented(images: Tensor, names: Sequence[str], draws: Draws, size: int = 0) -> Tensor:
    """Images of shape ``[n, channels, height, width]``, each under its own random map.

    Args:
        images: Normalised images; what comes in from outside is 0, the mean.
        names: Any of ``flip``, ``crop``, ``rotate``, ``zoom``, ``resized-crop``.
        draws: One row of random numbers for each image.
        size: Height and width of the result (0: as they are).
    """
    # Always all columns: naming one augmentation more changes no other one's numbers.
    maps = torch.from_numpy(_maps(draws.uniform(9), frozenset(names))).to(images)
    n, channels, height, width = images.shape
    grid = affine_grid(maps, [n, channels, size or height, size or width], align_corners=False)
    return grid_sample(images, grid, align_corners=False)


def _maps(numbers: NDArray[np.float64], names: frozenset[str]) -> NDArray[np.float64]:
    """Maps from output to input coordinates in [-1, 1], shape ``[n, 2, 3]``."""
    signed = 2 * numbers - 1
    still = np.zeros(len(numbers))
    mirror = np.where(numbers[:, 0] < 0.5, -1.0, 1.0) if "flip" in names else still + 1
    angle = signed[:, 1] * math.radians(ANGLE) if "rotate" in names else still
    scale = 1 + signed[:, 2] * ZOOM if "zoom" in names else still + 1
    across, down = (
        signed[:, 3:5] * 2 * SHIFT if "crop" in names else np.zeros_like(signed[:, 3:5])
    ).T
    wide, high = scale, scale
    if "resized-crop" in names:
        (wide, high), (right, low) = _window(numbers[:, 5:9])
        across, down = across + right, down + low
    cosine, sine = np.cos(angle), np.sin(angle)
    rows = [
        [cosine * wide * mirror, -sine * high, across],
        [sine * wide * mirror, cosine * high, down],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=1)


Columns = tuple[NDArray[np.float64], NDArray[np.float64]]


def _window(numbers: NDArray[np.float64]) -> tuple[Columns, Columns]:
    """A random part of each image: (width, height) and its middle (across, down).

    In units of the image's size, and of its half for the middle.
    """
    area = AREA[0] + (AREA[1] - AREA[0]) * numbers[:, 0]
    low, high = math.log(ASPECT[0]), math.log(ASPECT[1])
    aspect = np.exp(low + (high - low) * numbers[:, 1])
    wide = np.minimum(np.sqrt(area * aspect), 1.0)
    tall = np.minimum(np.sqrt(area / aspect), 1.0)
    signed = 2 * numbers[:, 2:4] - 1
    return (wide, tall), (signed[:, 0] * (1 - wide), signed[:, 1] * (1 - tall))
