"""From images to what goes into a network: size and cut, normalisation, augmentation, batches."""

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
from paceline.recipes.data.images import InMemory, Part, Photos, Split
from paceline.recipes.data.photos import AREA, ASPECT, NUMBERS
from paceline.recipes.options import IMAGE_MODELS, ImageOptions
from paceline.train import Draws
from paceline.train.order import Order

MARGIN = 8 / 7
"""Images are decoded so much larger than what is cut out of them: 256 for 224."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model and the options ask of images.

    Attributes:
        size: Height and width that go into the model (0: as they come).
        decoded: Height and width to which files are brought before (0: by the reader).
        crop: Files of another aspect are cut instead of squeezed.
        mean, deviation: Of each colour, as the pretrained model expects; empty measures them.
        channels: That go into the model (0: as they come).
    """

    size: int = 0
    decoded: int = 0
    crop: bool = False
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    channels: int = 0

    def fitted(self, shape: tuple[int, int, int]) -> int:
        """To what images of this shape are cut or enlarged; 0 when they are used as they are."""
        return 0 if tuple(shape[1:]) == (self.size, self.size) else self.size

    def normalise(self, channels: int) -> Normalisation | None:
        """The pretrained model's normalisation, also for grey images."""
        if not self.mean:
            return None
        if channels == len(self.mean) or (channels == 1 and self.channels == len(self.mean)):
            return Normalisation(self.mean, self.deviation)
        average = (sum(one) / len(one) for one in (self.mean, self.deviation))
        return Normalisation(*((one,) * channels for one in average))


def inputs(options: ImageOptions) -> Inputs:
    """What the options, and the model that they name, ask for."""
    found: Mapping[str, Any] = {}
    if options.model.startswith(torchvision_models.PREFIX):
        found = torchvision_models.preprocessing(options.model)
    elif options.model not in IMAGE_MODELS:
        wanted = pretrained.HubModel("image", options.model, options.offline)
        found = pretrained.load_preprocessing(wanted)
    elif options.weights:
        found = pretrained.preprocessing_of(options.weights)
    size = options.image_size or _size(found.get("size"))
    crop = "resized-crop" in options.augment
    mean, deviation = (tuple(found.get(name) or ()) for name in ("image_mean", "image_std"))
    decoded, channels = round(size * MARGIN) if crop else size, found.get("channels", 0)
    return Inputs(size, decoded, crop, mean, deviation, channels)


def _size(found: Any) -> int:
    """Libraries write 224, {"height": 224, "width": 224} or {"shortest_edge": 224}."""
    if isinstance(found, Mapping):
        found = found.get("height") or found.get("shortest_edge") or 0
    return int(found or 0)


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
        pixels: NDArray[np.uint8] | Tensor,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> Tensor:
        """Images of shape ``[n, channels, height, width]`` as a tensor of the same shape.

        Grey images become colour images where there is more than one mean.
        """
        # Bytes travel to the device, and become numbers there.
        there = torch.as_tensor(pixels, device=device).to(dtype)
        scale, shift = _line(self.mean, self.deviation, dtype, there.device)
        if there.shape[1] < len(self.mean):
            there = there.expand(-1, len(self.mean), -1, -1).clone()
        return there.mul_(scale).add_(shift)

    def to_json(self) -> dict[str, list[float]]:
        return {name: list(value) for name, value in asdict(self).items()}


@functools.lru_cache(4)
def _line(
    mean: tuple[float, ...], deviation: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Factor and summand of each channel; on an accelerator once, for copies make it wait."""
    with torch.inference_mode(False):  # the training uses them, too
        by = torch.tensor(deviation, dtype=torch.float64)
        scale = (1 / (255 * by))[:, None, None].to(dtype)
        shift = (-torch.tensor(mean, dtype=torch.float64) / by)[:, None, None].to(dtype)
        return scale.to(device), shift.to(device)


def normalisation(split: Split, channels: int) -> Normalisation:
    """Measured where all images are in memory, one half elsewhere.

    Sums of whole numbers: the same bits on every machine.
    """
    images = in_memory(split)
    if images is None:
        return Normalisation((0.5,) * channels, (0.25,) * channels)
    counts = np.zeros((channels, 256), np.int64)
    for first in range(0, len(images), _AT_ONCE):  # as long integers they take much room
        for channel, count in enumerate(counts):
            part = images[first : first + _AT_ONCE, channel]
            count += np.bincount(part.ravel(), minlength=256)
    return Normalisation(*zip(*(_moments(count) for count in counts), strict=True))


_AT_ONCE = 256


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
        # Photos are cut anew each time; others may be kept, which one process does best.
        cut = isinstance(split, Photos) and "resized-crop" in augment
        self._photos = split if isinstance(split, Photos) and cut else None
        self.slow = in_memory(split) is None
        self.processes = cut or getattr(split, "processes", False)
        self.will_need = getattr(split, "will_need", None)

    def __len__(self) -> int:
        return len(self._labels)

    def visiting_order(self, seed: int, shuffle: bool) -> Order:
        """Shards have an order of their own."""
        made = getattr(self._split, "visiting_order", None)
        return made(seed, shuffle) if made else Order(len(self), seed, shuffle)

    def batch(self, ids: NDArray[np.int64], draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Images ``[n, channels, height, width]`` as bytes, and labels ``[n]``."""
        if draws is not None and self._photos is not None:
            numbers = draws.uniform(_WINDOW + NUMBERS)[:, _WINDOW:]
            pixels = self._photos.cut_out(ids, numbers, self._size or self._photos.size)
        else:
            pixels = self._split.pixels(ids)
        return torch.from_numpy(pixels), self._labels[torch.from_numpy(ids)]

    def on_device(self, made: tuple[Tensor, Tensor], draws: Draws | None) -> tuple[Tensor, Tensor]:
        """The batch as the network takes it; computed where it lies."""
        (pixels, labels), names = made, () if draws is None else self._augment
        if self._photos is not None:  # they are cut already
            names = tuple(name for name in names if name != "resized-crop")
        if draws is not None and self._photos is not None and names == ("flip",):
            pixels, names = flipped(pixels, draws), ()  # exactly, and bytes are moved faster
        images = self._normalise(pixels, self._dtype)
        if draws is None or not names:
            return fitted(images, self._size), labels
        return augmented(images, names, draws, self._size), labels


def flipped(images: Tensor, draws: Draws) -> Tensor:
    """Half of the images, mirrored."""
    mirrored = torch.from_numpy(draws.uniform(1)[:, 0] < 0.5).to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


_WINDOW = 5  # the first of the random numbers that say what ``resized-crop`` takes
SHIFT = 1 / 8  # of the image's size, at most, by ``crop``
ANGLE = 15.0  # degrees, at most, by ``rotate``
ZOOM = 0.15  # relative, at most, by ``zoom``


def augmented(images: Tensor, names: Sequence[str], draws: Draws, size: int = 0) -> Tensor:
    """Images of shape ``[n, channels, height, width]``, each under its own random map.

    Args:
        images: Normalised images; what comes in from outside is 0, the mean.
        names: Any of ``flip``, ``vflip``, ``crop``, ``rotate``, ``zoom``, ``resized-crop``.
        draws: One row of random numbers for each image.
        size: Height and width of the result (0: as they are).
    """
    # Always all columns: naming one augmentation more changes no other one's numbers.
    maps = torch.from_numpy(_maps(draws.uniform(10), frozenset(names))).to(images)
    n, channels, height, width = images.shape
    grid = affine_grid(maps, [n, channels, size or height, size or width], align_corners=False)
    return grid_sample(images, grid, align_corners=False)


def _maps(numbers: NDArray[np.float64], names: frozenset[str]) -> NDArray[np.float64]:
    """Maps from output to input coordinates in [-1, 1], shape ``[n, 2, 3]``."""
    signed = 2 * numbers - 1
    still = np.zeros(len(numbers))
    mirror = np.where(numbers[:, 0] < 0.5, -1.0, 1.0) if "flip" in names else still + 1
    upturn = np.where(numbers[:, 9] < 0.5, -1.0, 1.0) if "vflip" in names else still + 1
    angle = signed[:, 1] * math.radians(ANGLE) if "rotate" in names else still
    scale = 1 + signed[:, 2] * ZOOM if "zoom" in names else still + 1
    across, down = (
        signed[:, 3:5] * 2 * SHIFT if "crop" in names else np.zeros_like(signed[:, 3:5])
    ).T
    wide, high = scale, scale
    if "resized-crop" in names:
        (wide, high), (right, low) = _window(numbers[:, _WINDOW : _WINDOW + 4])
        across, down = across + right, down + low
    cosine, sine = np.cos(angle), np.sin(angle)
    rows = [
        [cosine * wide * mirror, -sine * high * upturn, across],
        [sine * wide * mirror, cosine * high * upturn, down],
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
