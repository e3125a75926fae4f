"""Tar shards in the format of webdataset: images or texts, with their class in ``.cls``."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.data import SPLIT_NAMES
from paceline.recipes.data.decoding import SUFFIXES, FileSplit
from paceline.recipes.data.images import (
    DEFAULT_SIZE,
    ImageData,
    SplitInfo,
    fingerprint,
    split_seeded,
)
from paceline.recipes.options import ImageOptions
from paceline.spec.errors import DataError
from paceline.train import Ids, ShardedDataset
from paceline.train.data.order import Order
from paceline.train.data.shards import Sample
from paceline.train.files import read_bytes_limited

CLASSES = "classes.txt"
_CHUNK = 512  # samples


def matches(folder: Path) -> bool:
    """True if there are tar files, in the folder or in one for each part."""
    return bool(find_shards(folder))


def find_shards(folder: Path) -> dict[str, tuple[Path, str]]:
    """Returns folder and file pattern of each part.

    ``train-00000.tar`` and ``train/00000.tar`` belong to the part ``train``; without such names all
    shards do.
    """
    if not folder.is_dir():
        return {}
    parts: dict[str, tuple[Path, str]] = {}
    for split, names in SPLIT_NAMES.items():
        for name in reversed(names):
            if any((folder / name).glob("[!.]*.tar")):
                parts[split] = folder / name, "*.tar"
            elif any(folder.glob(f"{name}[-_.]*.tar")):
                parts[split] = folder, f"{name}[-_.]*.tar"
    if "train" not in parts and not parts and any(folder.glob("[!.]*.tar")):
        return {"train": (folder, "*.tar")}
    return parts if "train" in parts else {}


class ShardedImages(FileSplit):
    """Images in tar shards.

    Args:
        ids: Number of each image's sample, ascending.
    """

    def __init__(self, data: ShardedDataset, ids: Ids, size: int, crop: bool) -> None:
        super().__init__(data.numbers[ids], size, crop)
        self._data, self._ids = data, ids

    def _read(self, ids: NDArray[np.int64]) -> Sequence[Sample]:
        return self._data.raw(self._ids[ids])

    def _open(self, sample: Sample) -> BytesIO:
        return BytesIO(_image(sample))

    def _unreadable(self, number: int, sample: Sample, error: Exception) -> DataError:
        return DataError(
            f"{self._data.name(int(self._ids[number]), sample)} is not a readable image",
            found=str(error) or type(error).__name__,
            remedy="pack the shard again without it, or --skip-damaged",
        )

    def part(self, ids: NDArray[np.int64]) -> ShardedImages:
        return ShardedImages(self._data, self._ids[ids], self.size, self._crop)

    def visiting_order(self, seed: int, shuffle: bool) -> Order:
        """Returns an order that reads shards sequentially."""
        return self._data.visiting_order(seed, shuffle, self._ids)

    def will_need(self, ids: Ids) -> None:
        """Asks the system to read these images ahead."""
        self._data.will_need(self._ids[ids])


def _image(sample: Sample) -> bytes:
    for ending, content in sample.items():
        if "." + ending.rpartition(".")[2] in SUFFIXES:
            return bytes(content)
    raise ValueError(f"parts: {', '.join(name for name in sample if name != '__key__') or 'none'}")


def read(folder: Path, options: ImageOptions) -> ImageData:
    """Indexes the shards, and splits the training part if there is no other.

    Raises:
        DataError: A shard is damaged, samples have no class, or there are too few.
    """
    size = options.image_size or DEFAULT_SIZE
    parts = _parts(folder)
    classes = class_names(folder, max(int(part.numbers.max(initial=-1)) for part in parts.values()))
    splits = {
        name: ShardedImages(_check_classes(part), np.arange(len(part)), size, options.crop)
        for name, part in parts.items()
    }
    num_images = sum(len(split.labels) for split in splits.values())
    if options.skip_damaged:
        splits = {name: split.readable() for name, split in splits.items()}
    damaged = num_images - sum(len(split.labels) for split in splits.values())
    split_info: SplitInfo = {"method": "as in the files"}
    if set(splits) == {"train"}:
        ids, split_info = split_seeded(splits["train"].labels, options)
        splits = {name: splits["train"].part(part) for name, part in ids.items()}
    digests = [parts[name].fingerprint.encode() for name in sorted(parts)]
    labels = [splits[name].labels for name in sorted(splits)]
    return ImageData(
        options.data,
        classes,
        (3, size, size),
        splits,
        fingerprint([*digests, *labels]),
        split_info,
        damaged=damaged,
    )


def class_names(folder: Path, largest: int) -> tuple[str, ...]:
    """Reads the names of classes from ``classes.txt``, one a line; otherwise their numbers."""
    file = folder / CLASSES
    if not file.is_file():
        return tuple(str(number) for number in range(largest + 1))
    names = tuple(read_bytes_limited(file).decode().split("\n"))
    names = names[:-1] if names[-1] == "" else names
    if len(names) <= largest:
        raise DataError(
            f"{file} has too few names", found=f"{len(names)} lines, and a class {largest}"
        )
    return names


def _check_classes(data: ShardedDataset) -> ShardedDataset:
    """Returns the data; DataError if a sample has no class."""
    missing = np.flatnonzero(data.numbers < 0)
    if len(missing):
        first = int(missing[0])
        raise DataError(
            f"{data.name(first, data.raw(missing[:1])[0])} has no class",
            found=f"no number in a part .cls ({len(missing)} of {len(data)} samples)",
            remedy="pack a file KEY.cls with the number of the class beside each image",
        )
    return data


def texts(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Reads label (``.cls``) and text (``.txt``) of each sample, by part."""
    return {name: _rows(data) for name, data in _parts(folder).items()}


def _rows(data: ShardedDataset) -> list[tuple[str, str]]:
    rows = []
    for start in range(0, len(data), _CHUNK):
        ids = np.arange(start, min(start + _CHUNK, len(data)))
        for number, sample in zip(ids.tolist(), data.raw(ids), strict=True):
            try:
                rows.append((sample["cls"].decode().strip(), sample["txt"].decode()))
            except (KeyError, UnicodeDecodeError) as error:
                raise DataError(
                    f"{data.name(number, sample)} is not a text with a class",
                    found=f"{type(error).__name__}: {error}",
                    remedy="pack files KEY.txt (UTF-8) and KEY.cls",
                ) from None
    return rows


def _parts(folder: Path) -> dict[str, ShardedDataset]:
    return {
        name: ShardedDataset(location, pattern=pattern)
        for name, (location, pattern) in find_shards(folder).items()
    }
