"""A folder for each class, with or without train/val/test folders above them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
from paceline.recipes.data.photos import (
    SUFFIXES,
    cut_out,
    decode,
    image_files,
    is_litter,
    opened,
    side_by_side,
    unreadable,
)
from paceline.spec.errors import DataError
from paceline.train.data import allowed

_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
_KEEP_BYTES = 1 << 30  # decoded images are kept up to here, on every process
_CHECKED_FILES = 20_000  # headers of more files than this are read during the training only


class Files:
    """Images that are decoded when they are asked for, and kept while they fit into memory.

    Args:
        paths: Image files.
        labels: Class number of each.
        size: Height and width to which they are brought.
        crop: Cut the middle out of files of another aspect, instead of squeezing them.
    """

    def __init__(
        self, paths: Sequence[Path], labels: Labels, size: int, crop: bool = False
    ) -> None:
        self.paths, self.labels, self.size, self._crop = paths, labels, size, crop
        fits = len(paths) * 3 * size * size <= _KEEP_BYTES
        self._kept: dict[int, Pixels] | None = {} if fits else None
        self.processes = not fits

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        kept = self._kept or {}
        missing = [number for number in ids.tolist() if number not in kept]
        made = dict(zip(missing, self._decoded(missing), strict=True))
        if self._kept is not None:
            self._kept |= made
        return np.stack(
            [made[number] if number in made else kept[number] for number in ids.tolist()]
        )

    def _decoded(self, numbers: list[int]) -> list[Pixels]:
        size, crop = self.size, self._crop
        paths = [self.paths[number] for number in numbers]
        return side_by_side(lambda path: decode(path, 3, size, size, crop), paths)

    def cut_out(self, ids: NDArray[np.int64], numbers: Numbers, size: int) -> Pixels:
        """A random part of each image, out of the whole file."""

        def cut(item: tuple[int, Numbers]) -> Pixels:
            path = self.paths[item[0]]
            try:
                return cut_out(path, item[1], size)
            except Exception as error:  # a damaged image may raise anything
                raise unreadable(path, error) from None

        return np.stack(side_by_side(cut, [*zip(ids.tolist(), numbers, strict=True)]))


def matches(folder: Path) -> bool:
    """True for any folder: this format is tried last and says what it misses."""
    return folder.is_dir()


def read(folder: Path, request: Request) -> ImageData:
    """Lists the files, checks their headers and splits them where they are not split yet.

    Raises:
        DataError: No class folders, a class without images, an unreadable image.
    """
    size = request.image_size or DEFAULT_SIZE
    found = {name: path for name in _SPLITS if (path := _split_folder(folder, name))}
    classes = _class_folders(found.get("train", folder))
    if "train" in found:
        listed = {name: _listed(path, classes) for name, path in found.items()}
        how: dict[str, str | int | float] = {"method": "folders"}
    else:
        listed = _divided(folder, classes, request)
        how = {"method": "seeded", "seed": request.seed, "test_fraction": request.test_fraction}
    if len(listed) < 2:
        raise DataError(
            f"{folder} has a train folder but nothing held out",
            remedy="add a folder test or val with the same classes",
        )
    if request.skip_damaged:
        listed = {name: _readable(*one) for name, one in listed.items()}
    else:
        _check_headers([path for paths, _ in listed.values() for path in paths])
    splits: dict[str, Split] = {
        name: Files(paths, labels, size, request.crop) for name, (paths, labels) in listed.items()
    }
    marks = _fingerprint(folder, listed)
    ignored = sum(
        is_litter(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    return ImageData(request.source, classes, (3, size, size), splits, marks, how, ignored)


Listed = tuple[list[Path], Labels]


def _split_folder(folder: Path, split: str) -> Path | None:
    return next((folder / name for name in _SPLITS[split] if (folder / name).is_dir()), None)


def _class_folders(folder: Path) -> tuple[str, ...]:
    try:
        names = sorted(
            path.name
            for path in folder.iterdir()
            if path.is_dir() and not is_litter(Path(path.name))
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


def _listed(folder: Path, classes: tuple[str, ...]) -> Listed:
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


def _divided(folder: Path, classes: tuple[str, ...], request: Request) -> dict[str, Listed]:
    """Train and test parts with the same share of every class, drawn from the seed alone."""
    paths, labels = _listed(folder, classes)
    held_out = taken_out(labels, request.test_fraction, request.seed)
    if not held_out.any():
        raise DataError(
            f"{folder} has too few images to hold some out",
            found=f"{len(paths)} images in {len(classes)} classes",
            remedy="add images, or raise --test-fraction",
        )
    return {"train": _where(paths, labels, ~held_out), "test": _where(paths, labels, held_out)}


def _where(paths: list[Path], labels: Labels, mask: NDArray[np.bool_]) -> Listed:
    return [paths[number] for number in np.flatnonzero(mask)], labels[mask]


def _readable(paths: Sequence[Path], labels: Labels) -> Listed:
    """The files that can be read to their end; every one is tried."""
    with ThreadPoolExecutor(allowed()) as pool:
        mask = np.array(list(pool.map(_is_readable, paths)), dtype=bool)
    if not mask.any():
        raise DataError(f"none of the {len(paths)} images can be read", found=str(paths[0]))
    return _where(list(paths), labels, mask)


def _is_readable(path: Path) -> bool:
    try:
        with opened(path) as image:
            image.load()
    except Exception:  # a damaged image may raise anything
        return False
    return True


def _check_headers(paths: Sequence[Path]) -> None:
    if len(paths) > _CHECKED_FILES:
        return
    for path in paths:
        try:
            with opened(path):
                pass
        except Exception as error:  # a damaged image may raise anything
            raise unreadable(path, error) from None


def _fingerprint(folder: Path, listed: dict[str, Listed]) -> str:
    """Over names, sizes and parts: reading all pixels would take too long."""
    lines = [
        f"{split} {path.relative_to(folder)} {path.stat().st_size}"
        for split, (paths, _) in sorted(listed.items())
        for path in paths
    ]
    return fingerprint(["\n".join(lines).encode(errors="surrogateescape")])
