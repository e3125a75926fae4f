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


def augmented(images: Tensor, names: Sequence[str], draws: Draws) -> Tensor:
    """Images of shape ``[n, channels, height, width]``, each under its own random map.

    Args:
        images: Normalised images; what comes in from outside is 0, the mean.
        names: Any of ``flip``, ``crop``, ``rotate``, ``zoom``.
        draws: One row of random numbers for each image.
    """
    # Always all five columns: naming one augmentation more changes no other one's numbers.
    maps = torch.from_numpy(_maps(draws.uniform(5), frozenset(names))).to(images)
    grid = affine_grid(maps, list(images.shape), align_corners=False)
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
    cosine, sine = np.cos(angle) * scale, np.sin(angle) * scale
    rows = [[cosine * mirror, -sine, across], [sine * mirror, cosine, down]]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=1)
