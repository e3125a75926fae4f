"""Batches of images for training and evaluation: normalised, and augmented where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from paceline.recipes.augment import augmented
from paceline.recipes.datasets.images import InMemory, Part, Split
from paceline.train import Draws


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Brings pixels from 0…255 to mean 0 and deviation 1.

    Attributes:
        mean: Of each channel, in units of 255.
        deviation: Of each channel, in units of 255.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(
        self,
        pixels: NDArray[np.uint8],
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    ) -> Tensor:
        """Images of shape ``[n, channels, height, width]`` as a tensor of the same shape."""
        # Bytes travel to the device, and become numbers there.
        deviation = torch.tensor(self.deviation, dtype=torch.float64)
        scale = (1 / (255 * deviation))[:, None, None].to(dtype)
        shift = (-torch.tensor(self.mean, dtype=torch.float64) / deviation)[:, None, None].to(dtype)
        there = torch.from_numpy(pixels).to(device).to(dtype)
        return there.mul_(scale.to(device)).add_(shift.to(device))

    def to_json(self) -> dict[str, list[float]]:
        return {name: list(value) for name, value in asdict(self).items()}


def normalisation(split: Split, channels: int) -> Normalisation:
    """Measured where all images are in memory, one half elsewhere.

    Sums of whole numbers: the same bits on every machine.
    """
    images = in_memory(split)
    if images is None:
        return Normalisation((0.5,) * channels, (0.25,) * channels)
    counts = [np.bincount(images[:, c].ravel(), minlength=256) for c in range(channels)]
    return Normalisation(*zip(*(_moments(count) for count in counts), strict=True))


def in_memory(split: Split) -> NDArray[np.uint8] | None:
    """All images of a split where they are in memory already."""
    if isinstance(split, Part):
        whole = in_memory(split.whole)
        return None if whole is None else whole[split.ids]
    return split.images if isinstance(split, InMemory) else None


def _moments(count: NDArray[np.int64]) -> tuple[float, float]:
    values = np.arange(256)
    total = int(count.sum())
    mean = int((count * values).sum()) / total
    variance = int((count * values**2).sum()) / total - mean**2
    return mean / 255, max(variance**0.5 / 255, 1e-3)


def fitted(images: Tensor, size: int) -> Tensor:
    """The middle of larger images, smaller ones enlarged, ``size`` high and wide (0: as is)."""
    height, width = images.shape[2:]
    if not size or (height, width) == (size, size):
        return images
    if min(height, width) < size:
        return interpolate(images, (size, size), mode="bilinear", align_corners=False)
    top, left = (height - size) // 2, (width - size) // 2
    return images[:, :, top : top + size, left : left + size]


class Pictures:
    """A part of a data set as tensors.

    Args:
        split: Images and labels.
        normalise: How pixels become numbers.
        dtype: Format of these numbers.
        augment: Names of augmentations; used only where the batch is for training.
        size: Height and width of what comes out: the middle of larger images where nothing is
            augmented, smaller ones enlarged (0: as they are).
        device: Where all this is computed.
    """

    def __init__(
        self,
        split: Split,
        normalise: Normalisation,
        dtype: torch.dtype,
        augment: Sequence[str] = (),
        size: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self._split, self._normalise, self._dtype = split, normalise, dtype
        self._augment, self._size = tuple(augment), size
        self._device = device or torch.device("cpu")
        self._labels = torch.from_numpy(split.labels)
        self.slow = in_memory(split) is None

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, ids: NDArray[np.int64], draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Images ``[n, channels, height, width]`` and labels ``[n]``."""
        images = self._normalise(self._split.pixels(ids), self._dtype, self._device)
        if draws is not None and self._augment:
            images = augmented(images, self._augment, draws, self._size)
        else:
            images = fitted(images, self._size)
        return images, self._labels[torch.from_numpy(ids)]
