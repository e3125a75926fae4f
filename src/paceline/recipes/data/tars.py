"""Folders of tar shards, as webdataset packs them: images or texts, and their class as ``.cls``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.data import SPLIT_NAMES
from paceline.recipes.data.images import (
    DEFAULT_SIZE,
    ImageData,
    Labels,
    Numbers,
    Pixels,
    Request,
    Split,
    fingerprint,
    taken_out,
)
from paceline.recipes.data.photos import SUFFIXES, cut_out, opened, side_by_side, sized
from paceline.spec.errors import DataError
from paceline.train import Ids, ShardedDataset
from paceline.train.data import allowed
from paceline.train.order import Order
from paceline.train.shards import Sample

CLASSES = "classes.txt"
_AT_ONCE = 512  # samples


def matches(folder: Path) -> bool:
    """True where there are tar files, beside each other or in a folder for each part."""
    return bool(found(folder))


def found(folder: Path) -> dict[str, tuple[Path, str]]:
    """The parts that there are: folder and pattern of the shards of each.

    ``train-00000.tar`` and ``train/00000.tar`` are of the part ``train``; without such names all
    shards are.
    """
    if not folder.is_dir():
        return {}
    parts: dict[str, tuple[Path, str]] = {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            if any((folder / name).glob("[!.]*.tar")):
                parts[split] = folder / name, "*.tar"
            elif any(folder.glob(f"{name}[-_.]*.tar")):
                parts[split] = folder, f"{name}[-_.]*.tar"
    if "train" not in parts and not parts and any(folder.glob("[!.]*.tar")):
        return {"train": (folder, "*.tar")}
    return parts if "train" in parts else {}


class Packed:
    """Photos in shards.

    Args:
        data: The shards.
        ids: Which samples of them, ascending.
        size: Height and width to which they are brought.
        crop: Cut the middle out of images of another aspect, instead of squeezing them.
    """

    processes = True

    def __init__(self, data: ShardedDataset, ids: Ids, size: int, crop: bool) -> None:
        self._data, self._ids, self.size, self._crop = data, ids, size, crop
        self.labels: Labels = data.numbers[ids]

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        size = (self.size, self.size)
        return self._made(ids, lambda _, file: sized(file, 3, size, self._crop))

    def cut_out(self, ids: NDArray[np.int64], numbers: Numbers, size: int) -> Pixels:
        """A random part of each image, out of the whole file."""
        return self._made(ids, lambda place, file: cut_out(file, numbers[place], size))

    def _made(self, ids: NDArray[np.int64], make: Callable[[int, BytesIO], Pixels]) -> Pixels:
        chosen = self._ids[ids]
        samples = self._data.raw(chosen)

        def made(place: int) -> Pixels:
            try:
                return make(place, BytesIO(_image(samples[place])))
            except Exception as error:  # a damaged image may raise anything
                name = self._data.name(int(chosen[place]), samples[place])
                raise DataError(
                    f"{name} is no readable image",
                    found=str(error) or type(error).__name__,
                    remedy="pack the shard again without it, or --skip-damaged",
                ) from None

        return np.stack(side_by_side(made, range(len(chosen))))

    def part(self, ids: NDArray[np.int64]) -> Packed:
        """Some of these photos."""
        return Packed(self._data, self._ids[ids], self.size, self._crop)

    def visiting_order(self, seed: int, shuffle: bool) -> Order:
        """The order in which disks like to read."""
        return self._data.visiting_order(seed, shuffle, self._ids)

    def will_need(self, ids: Ids) -> None:
        """Has the system read these photos ahead."""
        self._data.will_need(self._ids[ids])


def _image(sample: Sample) -> bytes:
    for ending, content in sample.items():
        if "." + ending.rpartition(".")[2] in SUFFIXES:
            return bytes(content)
    raise ValueError(f"parts: {', '.join(name for name in sample if name != '__key__') or 'none'}")


def read(folder: Path, request: Request) -> ImageData:
    """Indexes the shards, and divides the training part where there is no other.

    Raises:
        DataError: A damaged shard; samples without a class; too few of them.
    """
    size = request.image_size or DEFAULT_SIZE
    parts = _parts(folder)
    classes = class_names(folder, max(int(part.numbers.max(initial=-1)) for part in parts.values()))
    photos = {
        name: Packed(part, _usable(part, request.skip_damaged), size, request.crop)
        for name, part in parts.items()
    }
    splits: dict[str, Split] = dict(photos)
    how: dict[str, str | int | float] = {"method": "as in the files"}
    if set(photos) == {"train"}:
        whole = photos["train"]
        out = taken_out(whole.labels, request.test_fraction, request.seed)
        if not out.any():
            raise DataError(
                f"{folder} has too few images to hold some out",
                found=f"{len(whole.labels)} images in {len(classes)} classes",
                remedy="add images, or raise --test-fraction",
            )
        splits = {name: whole.part(np.flatnonzero(out == held))
                  for name, held in (("train", False), ("test", True))}  # fmt: skip
        fraction = request.test_fraction
        how = {"method": "seeded", "seed": request.seed, "test_fraction": fraction}
    marks = [parts[name].fingerprint.encode() for name in sorted(parts)]
    labels = [splits[name].labels for name in sorted(splits)]
    return ImageData(
        request.source, classes, (3, size, size), splits, fingerprint([*marks, *labels]), how
    )


def class_names(folder: Path, largest: int) -> tuple[str, ...]:
    """Their names, one a line in ``classes.txt``, otherwise their numbers."""
    file = folder / CLASSES
    if not file.is_file():
        return tuple(str(number) for number in range(largest + 1))
    names = tuple(file.read_text(encoding="utf-8").split("\n"))
    names = names[:-1] if names[-1] == "" else names
    if len(names) <= largest:
        raise DataError(
            f"{file} has too few names", found=f"{len(names)} lines, and a class {largest}"
        )
    return names


def _usable(data: ShardedDataset, skip_damaged: bool) -> Ids:
    """All samples, which must have a class, or those whose image can be read to its end."""
    missing = np.flatnonzero(data.numbers < 0)
    if len(missing):
        first = int(missing[0])
        raise DataError(
            f"{data.name(first, data.raw(missing[:1])[0])} has no class",
            found=f"no number in a part .cls ({len(missing)} of {len(data)} samples)",
            remedy="pack a file KEY.cls with the number of the class beside each image",
        )
    ids = np.arange(len(data))
    if not skip_damaged:
        return ids
    with ThreadPoolExecutor(allowed()) as pool:
        kept = [one for _, samples in _chunks(data) for one in pool.map(_is_readable, samples)]
    return np.flatnonzero(np.array(kept, dtype=bool))


def _chunks(data: ShardedDataset) -> Iterator[tuple[Ids, list[Sample]]]:
    for start in range(0, len(data), _AT_ONCE):
        ids = np.arange(start, min(start + _AT_ONCE, len(data)))
        yield ids, data.raw(ids)


def _is_readable(sample: Sample) -> bool:
    try:
        with opened(BytesIO(_image(sample))) as image:
            image.load()
    except Exception:  # a damaged image may raise anything
        return False
    return True


def texts(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Label and text of each sample, by part: its ``.cls`` and ``.txt``.

    Raises:
        DataError: A damaged shard; a sample without one of them.
    """
    return {name: _rows(data) for name, data in _parts(folder).items()}


def _rows(data: ShardedDataset) -> list[tuple[str, str]]:
    rows = []
    for ids, samples in _chunks(data):
        for number, sample in zip(ids.tolist(), samples, strict=True):
            try:
                rows.append((sample["cls"].decode().strip(), sample["txt"].decode()))
            except (KeyError, UnicodeDecodeError) as error:
                raise DataError(
                    f"{data.name(number, sample)} is no text with a class",
                    found=f"{type(error).__name__}: {error}",
                    remedy="pack files KEY.txt (UTF-8) and KEY.cls",
                ) from None
    return rows


def _parts(folder: Path) -> dict[str, ShardedDataset]:
    return {
        name: ShardedDataset(where, pattern=pattern)
        for name, (where, pattern) in found(folder).items()
    }
