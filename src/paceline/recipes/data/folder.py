"""A folder for each class, with or without train/val/test folders above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.data.decoding import (
    SUFFIXES,
    FileSplit,
    describe_unread_files,
    image_files,
    is_system_file,
    open_image,
    unread_files,
    unreadable_error,
)
from paceline.recipes.data.images import (
    DEFAULT_SIZE,
    ImageData,
    Labels,
    Pixels,
    SplitInfo,
    fingerprint,
    split_seeded,
)
from paceline.recipes.options import ImageOptions
from paceline.spec import rundir
from paceline.spec.errors import DataError

_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
_MAX_CACHE_BYTES = 1 << 30  # of decoded images, in every process
_MAX_CHECKED_FILES = 20_000  # with more files, headers are checked only when decoding


class FolderSplit(FileSplit):
    """Images in files, cached once decoded if all fit into memory."""

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


def read(folder: Path, options: ImageOptions) -> ImageData:
    """Lists the files, checks their headers, and splits them if they are not split.

    Raises:
        DataError: No class folders, a class without images, or an unreadable image.
    """
    size = options.image_size or DEFAULT_SIZE
    folders = {name: path for name in _SPLITS if (path := _split_folder(folder, name))}
    classes = _class_folders(folders.get("train", folder), minimum=2)
    splits = {
        name: FolderSplit(*_list_class_folders(path, classes), size, options.crop)
        for name, path in (folders if "train" in folders else {"train": folder}).items()
    }
    split_info: SplitInfo = {"method": "folders"}
    images = [path for split in splits.values() for path in split.paths]
    unread = [
        path
        for path in unread_files(folder, images)
        if not _holds_runs(folder / path.relative_to(folder).parts[0])
    ]
    if "train" not in folders:
        ids, split_info = split_seeded(splits["train"].labels, options)
        splits = {name: splits["train"].part(part) for name, part in ids.items()}
    if len(splits) < 2:
        raise DataError(
            f"{folder} has a train folder but nothing held out",
            remedy="add a folder test or val with the same classes",
        )
    if options.skip_damaged:
        splits = {name: split.readable() for name, split in splits.items()}
    else:
        _check_headers(images)
    digest = _fingerprint(folder, splits)
    ignored = sum(
        is_system_file(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    damaged = len(images) - sum(len(split.labels) for split in splits.values())
    return ImageData(
        options.data,
        classes,
        (3, size, size),
        splits,
        digest,
        split_info,
        ignored,
        damaged,
        describe_unread_files(unread),
    )


def _split_folder(folder: Path, split: str) -> Path | None:
    return next((folder / name for name in _SPLITS[split] if (folder / name).is_dir()), None)


def _class_folders(folder: Path, minimum: int = 1) -> tuple[str, ...]:
    try:
        names = sorted(
            path.name
            for path in folder.iterdir()
            if path.is_dir() and not is_system_file(Path(path.name)) and not _holds_runs(path)
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be read", found=str(error)) from None
    if len(names) < minimum:
        required = "at least two classes" if minimum > 1 else "classes"
        raise DataError(
            f"{folder} holds no folders for {required}",
            found=f"folders: {', '.join(names) or 'none'}",
            remedy="one folder for each class, with its images inside",
        )
    return tuple(names)


def _holds_runs(folder: Path) -> bool:
    """Whether this is the folder of runs, made when a training is started in its data's folder."""
    records = (path for name in (rundir.PLAN, "batch.json") for path in folder.glob(f"*/{name}"))
    return folder.name == rundir.DEFAULT_PARENT and any(records)


def _list_class_folders(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], Labels]:
    paths: list[Path] = []
    labels: list[int] = []
    for name in _class_folders(folder):
        if name not in classes:
            raise DataError(f"{folder / name} is not a class of the training folder")
        images = _images(folder / name)
        paths += images
        labels += [classes.index(name)] * len(images)
    return paths, np.array(labels, dtype=np.int64)


def _images(folder: Path) -> list[Path]:
    images = image_files(folder)
    if not images:
        raise DataError(
            f"the class folder {folder} holds no images",
            found=describe_unread_files(unread_files(folder, ())) or "no files",
            remedy=f"add images ({', '.join(sorted(SUFFIXES))}) or move the folder elsewhere",
        )
    return images


def _check_headers(paths: Sequence[Path]) -> None:
    if len(paths) > _MAX_CHECKED_FILES:
        return
    for path in paths:
        try:
            with open_image(path):
                pass
        except Exception as error:  # a damaged image may raise anything
            raise unreadable_error(path, error) from None


def _fingerprint(folder: Path, splits: Mapping[str, FolderSplit]) -> str:
    """Hashes names, sizes and parts; reading all pixels would take too long."""
    lines = [
        f"{name} {path.relative_to(folder)} {path.stat().st_size}"
        for name, split in sorted(splits.items())
        for path in split.paths
    ]
    return fingerprint(["\n".join(lines).encode(errors="surrogateescape")])
