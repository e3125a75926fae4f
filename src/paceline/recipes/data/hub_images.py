"""Images with labels from a Hugging Face data set, by id or folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.recipes.data import HubSource
from paceline.recipes.data.folder import opened
from paceline.recipes.data.hub import is_saved, load_rows
from paceline.recipes.data.images import (
    ImageData,
    Labels,
    Pixels,
    Request,
    Split,
    fingerprint,
    taken_out,
)
from paceline.recipes.program import library
from paceline.spec.errors import DataError

DEFAULT_SIZE = 64


class Rows:
    """Images that are decoded when they are asked for.

    Args:
        rows: Of the data set.
        column: Holds the images.
        labels: Class number of each.
        size: Height and width to which they are brought.
        ids: Which rows, in this order.
    """

    slow = True

    def __init__(
        self, rows: Any, column: str, labels: Labels, size: int, ids: NDArray[np.int64]
    ) -> None:
        self._rows, self._column, self._size, self._ids = rows, column, size, ids
        self.labels = labels

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        numbers = [int(self._ids[i]) for i in ids]
        found: Sequence[Mapping[str, Any]] = self._rows[numbers][self._column]
        return np.stack([self._one(*one) for one in zip(numbers, found, strict=True)])

    def _one(self, number: int, held: Mapping[str, Any]) -> Pixels:
        """Of what the data set holds: an image file's bytes, or where it lies."""
        side = (self._size, self._size)
        try:
            file = BytesIO(held["bytes"]) if held["bytes"] is not None else Path(held["path"])
            with opened(file, side) as image:
                sized = image.convert("RGB").resize(side, Image.Resampling.BILINEAR)
        except Exception as error:  # a damaged image may raise anything
            raise DataError(
                f"row {number} of the data set holds no readable image", found=str(error)
            ) from None
        return np.array(sized, dtype=np.uint8).transpose(2, 0, 1)


def matches(folder: Path) -> bool:
    """True for a data set that was saved to disk, or a folder of parquet files."""
    return is_saved(folder) or any(folder.glob("*.parquet")) or any(folder.glob("data/*.parquet"))


def read(folder: Path | str, request: Request) -> ImageData:
    """Finds the columns, and divides the training part where there is no other.

    Raises:
        DataError: Not found, or without images and class labels.
    """
    parts = load_rows(HubSource(str(folder), request.config, request.offline))
    picture, label = _columns(str(folder), parts["train"].features)
    classes = tuple(str(one) for one in parts["train"].features[label].names)
    labels = {name: np.array(rows[label], dtype=np.int64) for name, rows in parts.items()}
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
        splits[name] = Rows(files[source], picture, labels[source][rows], size, rows)
    marks = fingerprint([str(folder).encode(), *(labels[name] for name in sorted(kept))])
    return ImageData(request.source, classes, (3, size, size), splits, marks, how)


def _files(rows: Any, column: str) -> Any:
    """The rows with images as files: they are decoded here, where a huge one is refused."""
    datasets = library("datasets", "images are read")
    return rows.cast_column(column, datasets.Image(decode=False))


def _columns(name: str, features: Mapping[str, Any]) -> tuple[str, str]:
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    found = [
        next((c for c, k in kinds.items() if k == want), "") for want in ("Image", "ClassLabel")
    ]
    if not all(found):
        raise DataError(
            f"--data {name} is no data set of images with class labels",
            found=", ".join(f"{column}: {kind}" for column, kind in kinds.items()),
        )
    return found[0], found[1]
