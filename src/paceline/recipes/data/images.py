"""Image data sets with class labels, and the choice of their reader."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.data import IMAGE_SETS, READERS, is_hub_id, local_path
from paceline.recipes.data.download import DownloadOptions, find_or_download
from paceline.recipes.options import ImageOptions
from paceline.spec import jobenv
from paceline.spec.errors import DataError
from paceline.spec.formatting import pluralize
from paceline.train.data.order import permutation

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Randoms = NDArray[np.float64]

SplitInfo = dict[str, str | int | float]
"""Record of how the parts of a data set were made."""

DEFAULT_SIZE = 64
"""Default height and width of images from files."""


class Split(Protocol):
    """A part of a data set.

    Attributes:
        labels: Class number of each image, shape ``[n]``.
    """

    @property
    def labels(self) -> Labels: ...

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        """Returns images of shape ``[len(ids), channels, height, width]``; DataError if damaged."""
        ...


@dataclass(frozen=True)
class InMemory:
    """Images as one array, shape ``[n, channels, height, width]``."""

    images: Pixels
    labels: Labels

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        return self.images[ids]


@dataclass(frozen=True)
class Subset:
    """Some images of a split."""

    parent: Split
    ids: NDArray[np.int64]

    @property
    def processes(self) -> bool:
        """Whether batches may be made in several processes."""
        return getattr(self.parent, "processes", False)

    @property
    def labels(self) -> Labels:
        return self.parent.labels[self.ids]

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        return self.parent.pixels(self.ids[ids])


@dataclass(frozen=True)
class Joined:
    """The images of several splits, one after the other."""

    parts: Sequence[Split]

    @property
    def labels(self) -> Labels:
        return np.concatenate([part.labels for part in self.parts])

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        starts = np.cumsum([0, *(len(part.labels) for part in self.parts)])
        places, images = list[NDArray[np.int64]](), list[Pixels]()
        for part, start, end in zip(self.parts, starts, starts[1:], strict=False):
            of_part = np.flatnonzero((ids >= start) & (ids < end))
            if len(of_part):
                places.append(of_part)
                images.append(part.pixels(ids[of_part] - start))
        return np.concatenate(images)[np.argsort(np.concatenate(places))]


def subset(parent: Split, ids: NDArray[np.int64]) -> Split:
    """Returns some images of a split, in this order."""
    part: Callable[[NDArray[np.int64]], Split] | None = getattr(parent, "part", None)
    return part(ids) if part else Subset(parent, ids)


@dataclass(frozen=True)
class ImageData:
    """Images with class labels.

    Attributes:
        source: Name or path as given.
        shape: (channels, height, width).
        splits: Always ``train``; the held-out parts are ``val`` and ``test``, at least one.
        fingerprint: Hash over content and split; equal exactly when both are.
        split: Record of how the parts were made.
        ignored: Number of system files in the folder (``._*``, ``__MACOSX``).
        damaged: Number of images that ``--skip-damaged`` left out.
        unread: Describes files in the folder that are no images of a class; empty if none.
    """

    source: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    splits: Mapping[str, Split]
    fingerprint: str
    split: SplitInfo
    ignored: int = 0
    damaged: int = 0
    unread: str = ""

    @property
    def held_out(self) -> str:
        """Name of the part for the final evaluation."""
        return "test" if "test" in self.splits else "val"

    @property
    def watched(self) -> str:
        """Name of the part for evaluations during the training."""
        return "val" if "val" in self.splits else "test"


def held_out_mask(labels: Labels, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Draws the held-out samples by the seed: the same fraction of each class, but not all."""
    out = np.zeros(len(labels), dtype=bool)
    for number in range(int(labels.max(initial=-1)) + 1):
        members = np.flatnonzero(labels == number)
        count = max(0, min(round(len(members) * fraction), len(members) - 1))
        out[members] = permutation(seed, number, len(members)) < count
    return out


def split_seeded(labels: Labels, options: ImageOptions) -> tuple[dict[str, Labels], SplitInfo]:
    """Draws the test part of a data set that has none: sample ids by part, and their record.

    Raises:
        DataError: There are too few images.
    """
    mask = held_out_mask(labels, options.test_fraction, options.seed)
    if not mask.any():
        sizes = np.unique(labels, return_counts=True)[1]
        classes = f"{len(sizes)} class{'es' * (len(sizes) != 1)}"
        remedy = "add images, or raise --test-fraction"
        if sizes.max(initial=0) < 2:
            remedy = "add images: a class needs one to train on and one to hold out; or a test part"
        raise DataError(
            f"{options.data} has too few images to hold some out",
            found=f"{pluralize(len(labels), 'image')} in {classes}",
            remedy=remedy,
        )
    fraction = options.test_fraction
    split_info: SplitInfo = {"method": "seeded", "seed": options.seed, "test_fraction": fraction}
    return {"train": np.flatnonzero(~mask), "test": np.flatnonzero(mask)}, split_info


def with_validation(data: ImageData, options: ImageOptions) -> ImageData:
    """Returns the data with a validation part, taken from the training part if necessary."""
    if not options.val_fraction or "val" in data.splits:
        return data
    training = data.splits["train"]
    # With the seed of the test part, the same places in each class would be drawn.
    mask = held_out_mask(training.labels, options.val_fraction, options.seed + 1_000_003)
    if not mask.any():
        raise DataError(
            f"{data.source} has too few training images to take some out for validation",
            remedy="raise --val-fraction, or leave it out",
        )
    remaining, validation = (subset(training, np.flatnonzero(part)) for part in (~mask, mask))
    return replace(
        data,
        splits={**data.splits, "train": remaining, "val": validation},
        fingerprint=fingerprint([data.fingerprint.encode(), np.flatnonzero(mask)]),
        split={**data.split, "val_fraction": options.val_fraction, "seed": options.seed},
    )


def check_labels(file: Path, labels: Labels, images: int, classes: int) -> None:
    """Raises DataError for labels that do not belong to these images or classes."""
    if len(labels) != images:
        raise DataError(
            f"{file} does not fit its images", found=f"{len(labels)} labels, {images} images"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise DataError(
            f"{file} holds a label out of range",
            found=f"label {labels[wrong[0]]} of image {wrong[0]}; there are {classes} classes,"
            f" 0 to {classes - 1}",
        )


def fingerprint(parts: Sequence[bytes | Pixels | Labels]) -> str:
    """Returns a short hash over arrays and bytes."""
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else np.ascontiguousarray(part).data
        digest.update(content)
    return digest.hexdigest()[:16]


def in_memory(
    options: ImageOptions, classes: tuple[str, ...], train: InMemory, test: InMemory
) -> ImageData:
    """Creates a data set with a train and a test part in memory."""
    _, channels, height, width = train.images.shape
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{options.data}: images of the two parts differ in size",
            found=f"train {train.images.shape[1:]}, test {test.images.shape[1:]}",
        )
    digest = fingerprint([train.images, train.labels, test.images, test.labels])
    return ImageData(
        options.data,
        classes,
        (channels, height, width),
        {"train": train, "test": test},
        digest,
        {"method": "as in the files"},
    )


def load(options: ImageOptions) -> ImageData:
    """Reads the data set; DataError if it is not found, unreadable or unsuitable."""
    dataset = IMAGE_SETS.get(options.data)
    if dataset is None:
        data = _from_path(local_path(Path(options.data).expanduser()), options)
    elif not dataset.folders:
        data = dummy(options)
    else:
        reader, download = _reader(dataset.reader), DownloadOptions(options.offline, options.mirror)
        folder = find_or_download(dataset, options.data_dir, reader.matches, download)
        data = reader.read(folder, options)
    return with_validation(data, options)


def _from_path(path: Path, options: ImageOptions) -> ImageData:
    if path.is_file():
        raise DataError(
            f"--data {options.data} is a file",
            found=str(path.absolute()),
            remedy="a folder of images; `paceline train text` trains on files of texts",
        )
    if not is_hub_id(options.data) and not path.is_dir():
        host = os.environ.get(jobenv.HOST)  # set by a launcher: data may exist on other hosts only
        raise DataError(
            f"--data {options.data}: no such folder",
            found=f"no {path.absolute()}" + (f" on {host}" if host else ""),
            remedy=f"a folder of images, or one of {', '.join(IMAGE_SETS)}"
            if not host
            else f"a folder of the launching machine is sent; others must be on every host at the"
            f" same path: copy it there (rsync -a {path}/ HOST:{path}/)",
        )
    if is_hub_id(options.data):
        data: ImageData = _reader("hub_images").read(options.data, options)
    else:
        reader = next(reader for reader in map(_reader, READERS) if reader.matches(path))
        data = reader.read(path, options)
    return data


def _reader(name: str) -> Any:
    return importlib.import_module(f"paceline.recipes.data.{name}")


DUMMY_CLASSES, DUMMY_SIZE, DUMMY_TRAIN, DUMMY_TEST = 1000, 224, 12_800, 1_280
_DUMMY_IMAGES = 64  # different ones, which repeat


@dataclass(frozen=True)
class Noise:
    """A few images that repeat, one for each label."""

    images: Pixels
    labels: Labels

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        return self.images[ids % len(self.images)]


def dummy(options: ImageOptions) -> ImageData:
    """Generates colour images of ``options.image_size`` (default 224) in 1000 classes."""
    size = options.image_size or DUMMY_SIZE
    generator = np.random.default_rng(options.seed)
    images = generator.integers(0, 256, (_DUMMY_IMAGES, 3, size, size), dtype=np.uint8)
    labels = {
        "train": np.arange(DUMMY_TRAIN) % DUMMY_CLASSES,
        "test": np.arange(DUMMY_TEST) % DUMMY_CLASSES,
    }
    return ImageData(
        "dummy",
        tuple(str(number) for number in range(DUMMY_CLASSES)),
        (3, size, size),
        {name: Noise(images, part) for name, part in labels.items()},
        fingerprint([images]),
        {"method": "generated", "seed": options.seed},
    )
