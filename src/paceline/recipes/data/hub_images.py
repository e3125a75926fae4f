"""Images with labels from a Hugging Face data set, by id or folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.program import library
from paceline.recipes.data import HubSource
from paceline.recipes.data.hub import is_saved, load_rows
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
from paceline.recipes.data.photos import SUFFIXES, File, cut_out, side_by_side, sized
from paceline.recipes.data.tars import class_names
from paceline.spec.errors import DataError, SettingError


class Rows:
    """Images that are decoded when they are asked for.

    Args:
        rows: Of the data set.
        column: Holds the images.
        labels: Class number of each.
        size: Height and width to which they are brought.
        ids: Which rows, in this order.
        crop: Cut the middle out of images of another aspect, instead of squeezing them.
    """

    processes = True

    def __init__(
        self,
        rows: Any,
        column: str,
        labels: Labels,
        size: int,
        ids: NDArray[np.int64],
        crop: bool = False,
    ) -> None:
        self._rows, self._column, self.size, self._ids = rows, column, size, ids
        self._crop = crop
        self.labels = labels

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        size = (self.size, self.size)
        return self._made(ids, lambda _, file: sized(file, 3, size, self._crop))

    def cut_out(self, ids: NDArray[np.int64], numbers: Numbers, size: int) -> Pixels:
        """A random part of each image, out of the whole file."""
        return self._made(ids, lambda place, file: cut_out(file, numbers[place], size))

    def _made(self, ids: NDArray[np.int64], make: Callable[[int, File], Pixels]) -> Pixels:
        """Of what the data set holds: an image file's bytes, or where it lies."""
        rows = self._ids[ids].tolist()
        found: Sequence[Mapping[str, Any]] = self._rows[rows][self._column]

        def made(place: int) -> Pixels:
            held = found[place]
            try:
                inside = held["bytes"] is not None
                return make(place, BytesIO(held["bytes"]) if inside else Path(held["path"]))
            except Exception as error:  # a damaged image may raise anything
                raise DataError(
                    f"row {rows[place]} of the data set holds no readable image", found=str(error)
                ) from None

        return np.stack(side_by_side(made, range(len(rows))))


def matches(folder: Path) -> bool:
    """True for a data set that was saved to disk, or a folder of parquet files."""
    return (
        is_saved(folder)
        or any(folder.glob("[!.]*.parquet"))
        or any(folder.glob("data/[!.]*.parquet"))
    )


def read(folder: Path | str, request: Request) -> ImageData:
    """Finds the columns, and divides the training part where there is no other.

    Raises:
        DataError: Not found, or without images and class labels.
        SettingError: Damaged images are to be left out, which needs files.
    """
    if request.skip_damaged:
        raise SettingError(
            f"--skip-damaged has no effect with --data {request.source}",
            found="the rows of a Hugging Face data set are not tried at the start",
            remedy="a folder of image files or tar shards, or leave --skip-damaged out",
        )
    parts = load_rows(HubSource(str(folder), request.config, request.offline))
    picture, label = _columns(str(folder), parts["train"].features)
    labels = {name: np.array(rows[label], dtype=np.int64) for name, rows in parts.items()}
    if (named := getattr(parts["train"].features[label], "names", None)) is None:
        named = class_names(Path(folder), max(int(one.max(initial=-1)) for one in labels.values()))
    classes = tuple(str(one) for one in named)
    # Public benchmarks hide the labels of their test part as -1.
    kept = [name for name in parts if labels[name].min(initial=0) >= 0]
    size = request.image_size or DEFAULT_SIZE
    ids = {name: np.arange(len(labels[name])) for name in kept}
    how: dict[str, str | int | float] = {"method": "as in the files"}
    if kept == ["train"]:
        out = taken_out(labels["train"], request.test_fraction, request.seed)
        ids = {"train": np.flatnonzero(~out), "test": np.flatnonzero(out)}
        fraction = request.test_fraction
        how = {"method": "seeded", "seed": request.seed, "test_fraction": fraction}
    files = {name: _files(parts[name], picture) for name in kept}
    splits: dict[str, Split] = {}
    for name, rows in ids.items():
        source = name if name in parts else "train"
        splits[name] = Rows(files[source], picture, labels[source][rows], size, rows, request.crop)
    marks = fingerprint([str(folder).encode(), *(labels[name] for name in sorted(kept))])
    return ImageData(request.source, classes, (3, size, size), splits, marks, how)


def _files(rows: Any, column: str) -> Any:
    """The rows with images as files: they are decoded here, where a huge one is refused."""
    datasets = library("datasets", "images are read")
    return rows.cast_column(column, datasets.Image(decode=False))


def _columns(name: str, features: Mapping[str, Any]) -> tuple[str, str]:
    """Of images and classes: by their kinds, else named as the parts of samples in tar shards."""
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    picture, label = (
        next((c for c, k in kinds.items() if k == want), "") for want in ("Image", "ClassLabel")
    )
    types = {column: str(getattr(one, "dtype", "")) for column, one in features.items()}
    packed = (c for c, t in types.items() if "." + c.lower() in SUFFIXES and "binary" in t)
    picture = picture or next(packed, "")
    label = label or ("cls" if "int" in types.get("cls", "") else "")
    if not (picture and label):
        raise DataError(
            f"--data {name} is no data set of images with class labels",
            found=", ".join(f"{column}: {kind}" for column, kind in kinds.items()),
            remedy="columns of the kinds Image and ClassLabel, or png (bytes) and cls (a number)",
        )
    return picture, label
