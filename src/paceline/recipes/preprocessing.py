"""Preparation of images for a network: size, normalisation, augmentation, batches."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate

from paceline.recipes import pretrained, torchvision_models
from paceline.recipes.data.decoding import CROP_AREA, CROP_ASPECT, CROP_RANDOMS, FileSplit
from paceline.recipes.data.images import InMemory, Split, Subset
from paceline.recipes.options import IMAGE_MODELS, ImageOptions
from paceline.recipes.pretrained_list import TORCHVISION_PREFIX
from paceline.train import Draws
from paceline.train.data.order import Order

DECODE_MARGIN = 8 / 7
"""Size of decoded images relative to random crops of them: 256 for 224."""


@dataclass(frozen=True, slots=True)
class InputFormat:
    """Format of images that the model and the options require.

    Attributes:
        size: Height and width of the model's input (0: as in the data).
        decode_size: Height and width of decoded files (0: default of the reader).
        mean, deviation: Normalisation of each colour for a pretrained model; if empty, measured.
        channels: Channels of the model's input (0: as in the data).
    """

    size: int = 0
    decode_size: int = 0
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    channels: int = 0

    def fitted(self, shape: tuple[int, int, int]) -> int:
        """Returns the size to which images of this shape are cropped or enlarged; 0 for none."""
        return 0 if tuple(shape[1:]) == (self.size, self.size) else self.size

    def normalise(self, channels: int) -> Normalisation | None:
        """Returns the pretrained model's normalisation, averaged over colours for grey images."""
        if not self.mean:
            return None
        if channels == len(self.mean) or (channels == 1 and self.channels == len(self.mean)):
            return Normalisation(self.mean, self.deviation)
        grey = (sum(values) / len(values) for values in (self.mean, self.deviation))
        return Normalisation(*((values,) * channels for values in grey))


def input_format(options: ImageOptions) -> InputFormat:
    """Determines the input format from the options and the model."""
    settings: Mapping[str, Any] = {}
    if options.model.startswith(TORCHVISION_PREFIX):
        settings = torchvision_models.preprocessing(options.model)
    elif options.model not in IMAGE_MODELS:
        hub_model = pretrained.HubModel("image", options.model, options.offline)
        settings = pretrained.load_preprocessing(hub_model)
    elif options.weights:
        settings = pretrained.saved_preprocessing(options.weights)
    size = options.image_size or _size(settings.get("size"))
    mean, deviation = (tuple(settings.get(name) or ()) for name in ("image_mean", "image_std"))
    decode_size = round(size * DECODE_MARGIN) if options.crop else size
    return InputFormat(size, decode_size, mean, deviation, settings.get("channels", 0))


def _size(value: Any) -> int:
    """Parses a library's size: 224, {"height": 224, "width": 224} or {"shortest_edge": 224}."""
    if isinstance(value, Mapping):
        value = value.get("height") or value.get("shortest_edge") or 0
    return int(value or 0)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Normalises pixels from 0…255 to mean 0 and standard deviation 1.

    Attributes:
        mean, deviation: Mean and standard deviation of each channel, in units of 255.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(
        self,
        pixels: NDArray[np.uint8] | Tensor,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> Tensor:
        """Normalises images of shape ``[n, channels, height, width]``.

        Grey images become colour images if there is more than one mean.
        """
        # Convert on the device: bytes are faster to copy.
        images = torch.as_tensor(pixels, device=device).to(dtype)
        scale, shift = _scale_and_shift(self.mean, self.deviation, dtype, images.device)
        if images.shape[1] < len(self.mean):
            images = images.expand(-1, len(self.mean), -1, -1).clone()
        return images.mul_(scale).add_(shift)

    def to_json(self) -> dict[str, list[float]]:
        return {name: list(value) for name, value in asdict(self).items()}


@functools.lru_cache(4)
def _scale_and_shift(
    mean: tuple[float, ...], deviation: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns factor and summand of each channel; cached, as copies block an accelerator."""
    with torch.inference_mode(False):  # also used in training
        divisor = torch.tensor(deviation, dtype=torch.float64)
        scale = (1 / (255 * divisor))[:, None, None].to(dtype)
        shift = (-torch.tensor(mean, dtype=torch.float64) / divisor)[:, None, None].to(dtype)
        return scale.to(device), shift.to(device)


def normalisation(split: Split, channels: int) -> Normalisation:
    """Measures mean and deviation of images in memory; 0.5 and 0.25 otherwise.

    Sums are integers, so that the result has the same bits on every machine.
    """
    images = in_memory(split)
    if images is None:
        return Normalisation((0.5,) * channels, (0.25,) * channels)
    histograms = np.zeros((channels, 256), np.int64)
    for first in range(0, len(images), _CHUNK):  # bincount converts to int64
        for channel, histogram in enumerate(histograms):
            part = images[first : first + _CHUNK, channel]
            histogram += np.bincount(part.ravel(), minlength=256)
    return Normalisation(
        *zip(*(_mean_and_deviation(histogram) for histogram in histograms), strict=True)
    )


_CHUNK = 256


def in_memory(split: Split) -> NDArray[np.uint8] | None:
    """Returns all images of a split if they are in memory, else ``None``."""
    if isinstance(split, Subset):
        parent = in_memory(split.parent)
        return None if parent is None else parent[split.ids]
    return split.images if isinstance(split, InMemory) else None


def _mean_and_deviation(histogram: NDArray[np.int64]) -> tuple[float, float]:
    values = np.arange(256)
    total = int(histogram.sum())
    mean = int((histogram * values).sum()) / total
    variance = int((histogram * values**2).sum()) / total - mean**2
    return mean / 255, max(variance**0.5 / 255, 1e-3)


def fitted(images: Tensor, size: int) -> Tensor:
    """Crops the centre of larger images, or enlarges smaller ones, to ``size`` (0: unchanged)."""
    height, width = images.shape[2:]
    if not size or (height, width) == (size, size):
        return images
    if min(height, width) < size:
        return interpolate(images, (size, size), mode="bilinear", align_corners=False)
    top, left = (height - size) // 2, (width - size) // 2
    return images[:, :, top : top + size, left : left + size]


class ImageTensors:
    """A part of an image data set as tensors.

    Args:
        augment: Names of augmentations, for training batches only.
        size: Height and width of the result: cropped from the centre of larger images if nothing is
            augmented, enlarged from smaller ones (0: unchanged).
    """

    def __init__(
        self,
        split: Split,
        normalise: Normalisation,
        dtype: torch.dtype,
        augment: Sequence[str] = (),
        size: int = 0,
    ) -> None:
        self._split, self._normalise, self._dtype = split, normalise, dtype
        self._augment, self._size = tuple(augment), size
        self._labels = torch.from_numpy(split.labels)
        # Random crops decode files again each time; other images may be cached in one process.
        is_cropped = isinstance(split, FileSplit) and "resized-crop" in augment
        self._cropped_split = split if isinstance(split, FileSplit) and is_cropped else None
        self.slow = in_memory(split) is None
        self.processes = is_cropped or getattr(split, "processes", False)
        self.will_need = getattr(split, "will_need", None)

    def __len__(self) -> int:
        return len(self._labels)

    def visiting_order(self, seed: int, shuffle: bool) -> Order:
        """Returns the split's own order, if it has one."""
        order = getattr(self._split, "visiting_order", None)
        return order(seed, shuffle) if order else Order(len(self), seed, shuffle)

    def batch(self, ids: NDArray[np.int64], draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Returns images ``[n, channels, height, width]`` as bytes, and labels ``[n]``."""
        if draws is not None and self._cropped_split is not None:
            numbers = draws.uniform(_CROP_COLUMN + CROP_RANDOMS)[:, _CROP_COLUMN:]
            pixels = self._cropped_split.random_crops(
                ids, numbers, self._size or self._cropped_split.size
            )
        else:
            pixels = self._split.pixels(ids)
        return torch.from_numpy(pixels), self._labels[torch.from_numpy(ids)]

    def on_device(self, batch: tuple[Tensor, Tensor], draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Normalises and augments a batch on its device."""
        (pixels, labels), names = batch, () if draws is None else self._augment
        if self._cropped_split is not None:  # already cropped
            names = tuple(name for name in names if name != "resized-crop")
        if draws is not None and self._cropped_split is not None and names == ("flip",):
            pixels, names = flipped(pixels, draws), ()  # exact, and faster on bytes
        images = self._normalise(pixels, self._dtype)
        if draws is None or not names:
            return fitted(images, self._size), labels
        return augmented(images, names, draws, self._size), labels


def flipped(images: Tensor, draws: Draws) -> Tensor:
    """Mirrors half of the images."""
    mirrored = torch.from_numpy(draws.uniform(1)[:, 0] < 0.5).to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


_CROP_COLUMN = 5  # first of the random numbers that ``resized-crop`` uses
MAX_SHIFT = 1 / 8  # of ``crop``, relative to the image's size
MAX_ANGLE = 15.0  # of ``rotate``, in degrees
MAX_ZOOM = 0.15  # of ``zoom``, relative


def augmented(images: Tensor, names: Sequence[str], draws: Draws, size: int = 0) -> Tensor:
    """Transforms images of shape ``[n, channels, height, width]``, each by its own random map.

    Args:
        images: Normalised images; pixels from outside are 0, the mean.
        names: Any of ``flip``, ``vflip``, ``crop``, ``rotate``, ``zoom``, ``resized-crop``.
        draws: One row of random numbers for each image.
        size: Height and width of the result (0: unchanged).
    """
    # Always draw all columns, so that each augmentation has the same numbers in any combination.
    maps = torch.from_numpy(_maps(draws.uniform(10), frozenset(names))).to(images)
    n, channels, height, width = images.shape
    grid = affine_grid(maps, [n, channels, size or height, size or width], align_corners=False)
    return grid_sample(images, grid, align_corners=False)


def _maps(numbers: NDArray[np.float64], names: frozenset[str]) -> NDArray[np.float64]:
    """Returns maps from output to input coordinates in [-1, 1], shape ``[n, 2, 3]``."""
    signed = 2 * numbers - 1
    zeros = np.zeros(len(numbers))
    mirror = np.where(numbers[:, 0] < 0.5, -1.0, 1.0) if "flip" in names else zeros + 1
    vertical = np.where(numbers[:, 9] < 0.5, -1.0, 1.0) if "vflip" in names else zeros + 1
    angle = signed[:, 1] * math.radians(MAX_ANGLE) if "rotate" in names else zeros
    scale = 1 + signed[:, 2] * MAX_ZOOM if "zoom" in names else zeros + 1
    x_shift, y_shift = (
        signed[:, 3:5] * 2 * MAX_SHIFT if "crop" in names else np.zeros_like(signed[:, 3:5])
    ).T
    width, height = scale, scale
    if "resized-crop" in names:
        (width, height), (x, y) = _crop_window(numbers[:, _CROP_COLUMN : _CROP_COLUMN + 4])
        x_shift, y_shift = x_shift + x, y_shift + y
    cosine, sine = np.cos(angle), np.sin(angle)
    rows = [
        [cosine * width * mirror, -sine * height * vertical, x_shift],
        [sine * width * mirror, cosine * height * vertical, y_shift],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=1)


Vectors = tuple[NDArray[np.float64], NDArray[np.float64]]


def _crop_window(numbers: NDArray[np.float64]) -> tuple[Vectors, Vectors]:
    """Draws a part of each image: (width, height) and its centre (x, y).

    They are relative to the image's size, the centre to half of it.
    """
    area = CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * numbers[:, 0]
    low, high = math.log(CROP_ASPECT[0]), math.log(CROP_ASPECT[1])
    aspect = np.exp(low + (high - low) * numbers[:, 1])
    width = np.minimum(np.sqrt(area * aspect), 1.0)
    height = np.minimum(np.sqrt(area / aspect), 1.0)
    signed = 2 * numbers[:, 2:4] - 1
    return (width, height), (signed[:, 0] * (1 - width), signed[:, 1] * (1 - height))
