"""A folder for each class, with or without train/val/test folders above them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.data.decoding import (
    SUFFIXES,
    FileSplit,
    image_files,
    is_system_file,
    open_image,
    unreadable_error,
)
from paceline.recipes.data.images import (
    DEFAULT_SIZE,
    ImageData,
    Labels,
    Pixels,
    Request,
    Split,
    SplitInfo,
    fingerprint,
    split_seeded,
)
from paceline.spec.errors import DataError
from paceline.train.data.fetch import usable_cpus

_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
_MAX_CACHE_BYTES = 1 << 30  # of decoded images, in every process
_MAX_CHECKED_FILES = 20_000  # with more files, headers are checked only when decoding


class FolderSplit(FileSplit):
    """Images in files, cached once decoded if all fit into memory.

    Args:
        paths: Image files.
        labels: Class number of each.
        size: Height and width to which images are resized.
        crop: Crop the centre of images with another aspect ratio instead of squeezing them.
    """

    def __init__(
        self, paths: Sequence[Path], labels: Labels, size: int, crop: bool = False
    ) -> None:
        super().__init__(labels, size, crop)
        self.paths = paths
        self._cache: dict[int, Pixels] = {}
        self.processes = len(paths) * 3 * size * size > _MAX_CACHE_BYTES

    def part(self, ids: NDArray[np.int64]) -> FolderSplit:
        paths = [self.paths[number] for number in ids.tolist()]
        return FolderSplit(paths, self.labels[ids], self.size, self._crop)

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        if self.processes:
            return super().pixels(ids)
        uncached = [number for number in ids.tolist() if number not in self._cache]
        if uncached:
            self._cache |= dict(zip(uncached, super().pixels(np.array(uncached)), strict=True))
        return np.stack([self._cache[number] for number in ids.tolist()])

    def _read(self, ids: NDArray[np.int64]) -> list[Path]:
        return [self.paths[number] for number in ids.tolist()]

    def _open(self, sample: Path) -> Path:
        return sample

    def _unreadable(self, number: int, sample: Path, error: Exception) -> DataError:
        return unreadable_error(sample, error)


def matches(folder: Path) -> bool:
    """True for any folder: this format is tried last, and reports what is missing."""
    return folder.is_dir()


def read(folder: Path, request: Request) -> ImageData:
    """Lists the files, checks their headers, and splits them if they are not split.

    Raises:
        DataError: No class folders, a class without images, or an unreadable image.
    """
    size = request.image_size or DEFAULT_SIZE
    folders = {name: path for name in _SPLITS if (path := _split_folder(folder, name))}
    classes = _class_folders(folders.get("train", folder))
    if "train" in folders:
        listed = {name: _list_class_folders(path, classes) for name, path in folders.items()}
        split_info: SplitInfo = {"method": "folders"}
    else:
        paths, labels = _list_class_folders(folder, classes)
        mask, split_info = split_seeded(labels, request)
        listed = {"train": _select(paths, labels, ~mask), "test": _select(paths, labels, mask)}
    if len(listed) < 2:
        raise DataError(
            f"{folder} has a train folder but nothing held out",
            remedy="add a folder test or val with the same classes",
        )
    if request.skip_damaged:
        listed = {name: _drop_damaged(*files) for name, files in listed.items()}
    else:
        _check_headers([path for paths, _ in listed.values() for path in paths])
    splits: dict[str, Split] = {
        name: FolderSplit(paths, labels, size, request.crop)
        for name, (paths, labels) in listed.items()
    }
    digest = _fingerprint(folder, listed)
    ignored = sum(
        is_system_file(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    return ImageData(request.source, classes, (3, size, size), splits, digest, split_info, ignored)


LabelledPaths = tuple[list[Path], Labels]


def _split_folder(folder: Path, split: str) -> Path | None:
    return next((folder / name for name in _SPLITS[split] if (folder / name).is_dir()), None)


def _class_folders(folder: Path) -> tuple[str, ...]:
    try:
        names = sorted(
            path.name
            for path in folder.iterdir()
            if path.is_dir() and not is_system_file(Path(path.name))
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be read", found=str(error)) from None
    if len(names) < 2:
        raise DataError(
            f"{folder} holds no folders for at least two classes",
            found=f"folders: {', '.join(names) or 'none'}",
            remedy="one folder for each class, with its images inside",
        )
    return tuple(names)


def _list_class_folders(folder: Path, classes: tuple[str, ...]) -> LabelledPaths:
    paths: list[Path] = []
    labels: list[int] = []
    for name in _class_folders(folder):
        if name not in classes:
            raise DataError(f"{folder / name} is no class of the training folder")
        images = _images(folder / name)
        paths += images
        labels += [classes.index(name)] * len(images)
    return paths, np.array(labels, dtype=np.int64)


def _images(folder: Path) -> list[Path]:
    images = image_files(folder)
    if not images:
        raise DataError(
            f"the class folder {folder} holds no images",
            found=f"{sum(1 for _ in folder.iterdir())} other entries",
            remedy=f"add images ({', '.join(sorted(SUFFIXES))}) or remove the folder",
        )
    return images


def _select(paths: list[Path], labels: Labels, mask: NDArray[np.bool_]) -> LabelledPaths:
    return [paths[number] for number in np.flatnonzero(mask)], labels[mask]


def _drop_damaged(paths: Sequence[Path], labels: Labels) -> LabelledPaths:
    """Keeps the files that can be decoded completely."""
    with ThreadPoolExecutor(usable_cpus()) as pool:
        mask = np.array(list(pool.map(_is_readable, paths)), dtype=bool)
    if not mask.any():
        raise DataError(f"none of the {len(paths)} images can be read", found=str(paths[0]))
    return _select(list(paths), labels, mask)


def _is_readable(path: Path) -> bool:
    try:
        with open_image(path) as image:
            image.load()
    except Exception:  # a damaged image may raise anything
        return False
    return True


def _check_headers(paths: Sequence[Path]) -> None:
    if len(paths) > _MAX_CHECKED_FILES:
        return
    for path in paths:
        try:
            with open_image(path):
                pass
        except Exception as error:  # a damaged image may raise anything
            raise unreadable_error(path, error) from None


def _fingerprint(folder: Path, listed: dict[str, LabelledPaths]) -> str:
    """Hashes names, sizes and parts; reading all pixels would take too long."""
    lines = [
        f"{split} {path.relative_to(folder)} {path.stat().st_size}"
        for split, (paths, _) in sorted(listed.items())
        for path in paths
    ]
    return fingerprint(["\n".join(lines).encode(errors="surrogateescape")])
