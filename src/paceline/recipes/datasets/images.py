"""What a data set of images is, whatever its files look like."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.spec.errors import DataError
from paceline.train.order import permutation

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


class Split(Protocol):
    """A part of a data set.

    Attributes:
        labels: Class number of each image, shape ``[n]``.
    """

    @property
    def labels(self) -> Labels: ...

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        """Images, shape ``[len(ids), channels, height, width]``.

        Raises:
            DataError: An image cannot be read.
        """
        ...


@dataclass(frozen=True)
class InMemory:
    """Images as one array, shape ``[n, channels, height, width]``."""

    images: Pixels
    labels: Labels

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        return self.images[ids]


@dataclass(frozen=True)
class Part:
    """Some images of a split, in this order."""

    whole: Split
    ids: NDArray[np.int64]

    @property
    def labels(self) -> Labels:
        return self.whole.labels[self.ids]

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        return self.whole.pixels(self.ids[ids])


@dataclass(frozen=True)
class ImageData:
    """Images with class labels.

    Attributes:
        source: Name or path, as recorded with the model.
        classes: Name of each class.
        shape: (channels, height, width).
        splits: Always ``train``; the held-out parts are ``val`` and ``test``, at least one.
        fingerprint: Hash over content and split; equal exactly when both are.
        split: How the parts came about, for the record.
    """

    source: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    splits: dict[str, Split]
    fingerprint: str
    split: dict[str, str | int | float]

    @property
    def held_out(self) -> str:
        """The part whose figures are reported at the end."""
        return "test" if "test" in self.splits else "val"

    @property
    def watched(self) -> str:
        """The part that is looked at during the training, and may steer it."""
        return "val" if "val" in self.splits else "test"


@dataclass(frozen=True, slots=True)
class Request:
    """What a reader needs to know besides the files.

    Attributes:
        source: Name or path as given.
        classes: Names for the classes, where the files hold none.
        image_size: Height and width to which files of differing sizes are brought.
        test_fraction: Held-out part where the files have no split of their own.
        val_fraction: Part of the training images for validation where the files have none.
        seed: Seed of these splits.
        crop: Cut the middle out of files of another aspect, instead of squeezing them.
        skip_damaged: Leave unreadable files out, instead of refusing them.
        config: Configuration of a Hugging Face data set.
        offline: Whether the network must not be touched.
    """

    source: str
    classes: tuple[str, ...] = ()
    image_size: int = 0
    test_fraction: float = 0.2
    val_fraction: float = 0.0
    seed: int = 0
    crop: bool = False
    skip_damaged: bool = False
    config: str = ""
    offline: bool = False


def taken_out(labels: Labels, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which samples are held out: the same part of every class, drawn from the seed alone.

    Every class keeps at least one sample that is not.
    """
    out = np.zeros(len(labels), dtype=bool)
    for number in range(int(labels.max(initial=-1)) + 1):
        members = np.flatnonzero(labels == number)
        count = max(0, min(round(len(members) * fraction), len(members) - 1))
        out[members] = permutation(seed, number, len(members)) < count
    return out


def with_validation(data: ImageData, request: Request) -> ImageData:
    """The data with a validation part, taken out of the training part where they have none."""
    if not request.val_fraction or "val" in data.splits:
        return data
    whole = data.splits["train"]
    # Another seed than that of a test part, which would choose the same places in each class.
    out = taken_out(whole.labels, request.val_fraction, request.seed + 1_000_003)
    if not out.any():
        raise DataError(
            f"{data.source} has too few training images to take some out for validation",
            remedy="raise --val-fraction, or leave it out",
        )
    parts: dict[str, Split] = {
        "train": Part(whole, np.flatnonzero(~out)),
        "val": Part(whole, np.flatnonzero(out)),
    }
    return replace(
        data,
        splits={**data.splits, **parts},
        fingerprint=fingerprint([data.fingerprint.encode(), np.flatnonzero(out)]),
        split={**data.split, "val_fraction": request.val_fraction, "seed": request.seed},
    )


def check_labels(file: Path, labels: Labels, images: int, classes: int) -> None:
    """Refuses labels that do not belong to these images or classes.

    Raises:
        DataError: Names the file and the first bad label.
    """
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
    """A short hash over arrays and texts."""
    digest = hashlib.sha256()
    for one in parts:
        content = one if isinstance(one, bytes) else np.ascontiguousarray(one).data
        digest.update(content)
    return digest.hexdigest()[:16]


def in_memory(
    request: Request, classes: tuple[str, ...], train: InMemory, test: InMemory
) -> ImageData:
    """A data set whose files hold a train and a test part."""
    _, channels, height, width = train.images.shape
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{request.source}: images of the two parts differ in size",
            found=f"train {train.images.shape[1:]}, test {test.images.shape[1:]}",
        )
    marks = fingerprint([train.images, train.labels, test.images, test.labels])
    return ImageData(
        request.source,
        classes,
        (channels, height, width),
        {"train": train, "test": test},
        marks,
        {"method": "as in the files"},
    )
