"""Images with class labels: what a data set is, and how ``--data`` finds its files and reader."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.data import NAMED, READERS, is_hub_id, on_this_host
from paceline.recipes.data.download import Ways, folder_of
from paceline.spec import jobenv
from paceline.spec.errors import DataError
from paceline.train.order import permutation

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Numbers = NDArray[np.float64]

DEFAULT_SIZE = 64
"""Height and width to which images of differing sizes are brought where nobody says another."""


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


@runtime_checkable
class Photos(Split, Protocol):
    """A part whose images are decoded from files, each at its own size.

    Attributes:
        size: Height and width of what ``pixels`` gives.
    """

    @property
    def size(self) -> int: ...

    def cut_out(self, ids: NDArray[np.int64], numbers: Numbers, size: int) -> Pixels:
        """A random part of each image, shape ``[len(ids), 3, size, size]``.

        Args:
            ids: Which images.
            numbers: Uniform ones in [0, 1), ``photos.NUMBERS`` for each image.
            size: Height and width.

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
    def processes(self) -> bool:
        """Batches may be made in several processes: none keeps what it has made."""
        return getattr(self.whole, "processes", False)

    @property
    def labels(self) -> Labels:
        return self.whole.labels[self.ids]

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        return self.whole.pixels(self.ids[ids])


@dataclass(frozen=True)
class PhotoPart(Part):
    """Some photos."""

    whole: Photos

    @property
    def size(self) -> int:
        return self.whole.size

    def cut_out(self, ids: NDArray[np.int64], numbers: Numbers, size: int) -> Pixels:
        return self.whole.cut_out(self.ids[ids], numbers, size)


def part_of(whole: Split, ids: NDArray[np.int64]) -> Split:
    """Some images of a split, in this order."""
    if (part := getattr(whole, "part", None)) is not None:
        found: Split = part(ids)
        return found
    return PhotoPart(whole, ids) if isinstance(whole, Photos) else Part(whole, ids)


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
        ignored: Number of files that operating systems left in the folder (``._*``, ``__MACOSX``).
    """

    source: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    splits: dict[str, Split]
    fingerprint: str
    split: dict[str, str | int | float]
    ignored: int = 0

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
        mirror: Address that is asked first for the files of a named set; may be empty.
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
    mirror: str = ""


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
        "train": part_of(whole, np.flatnonzero(~out)),
        "val": part_of(whole, np.flatnonzero(out)),
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


def load(data_dir: str, request: Request) -> ImageData:
    """Reads the data set that ``request.source`` names.

    Args:
        data_dir: Where the files of a named set are, or are downloaded to; may be empty.
        request: Name or path of the data set, and how to prepare it.

    Raises:
        DataError: Not found, unreadable or unfit.
    """
    named = NAMED.get(request.source)
    if named is not None and not named.folders:
        return with_validation(dummy(request), request)
    if named is None:
        return _from_path(on_this_host(Path(request.source).expanduser()), request)
    ways = Ways(request.offline, request.mirror)
    folder = folder_of(named, data_dir, _module(named.reader).matches, ways)
    return _read(named.reader, folder, replace(request, classes=named.classes))


def _from_path(path: Path, request: Request) -> ImageData:
    if is_hub_id(request.source):
        made: ImageData = _module("hub_images").read(request.source, request)
        return with_validation(made, request)
    if not path.is_dir():
        raise DataError(
            f"--data {request.source}: no such folder",
            found=f"{path.absolute()} is a file" if path.exists() else missing(path),
            remedy=f"a folder of images, or one of {', '.join(NAMED)}"
            if not launched()
            else f"a folder of the launching machine is sent; others must be on every host at the"
            f" same path: copy it there (rsync -a {path}/ HOST:{path}/)",
        )
    fits = (name for name in READERS if _module(name).matches(path))
    return _read(next(fits), path, request)


def launched() -> bool:
    """Whether this is a rank of ours: the data may be there on other hosts only."""
    return bool(os.environ.get(jobenv.HOST))


def missing(path: Path) -> str:
    """That there is no such path, and on which host."""
    host = os.environ.get(jobenv.HOST)
    return f"no {path.absolute()}" + (f" on {host}" if host else "")


def _read(reader: str, folder: Path, request: Request) -> ImageData:
    data: ImageData = _module(reader).read(folder, request)
    return with_validation(data, request)


def _module(reader: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"paceline.recipes.data.{reader}")


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
