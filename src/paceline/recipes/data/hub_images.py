"""Images with labels from a Hugging Face data set, by id or folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.program import library
from paceline.recipes.data.decoding import SUFFIXES, File, FileSplit
from paceline.recipes.data.hub import is_saved, load_rows
from paceline.recipes.data.images import (
    DEFAULT_SIZE,
    ImageData,
    Labels,
    SplitInfo,
    fingerprint,
    split_seeded,
)
from paceline.recipes.data.tars import class_names
from paceline.recipes.options import ImageOptions
from paceline.spec.errors import DataError, SettingError


class HubSplit(FileSplit):
    """Images in a column of a data set.

    Args:
        column: Name of the column with images.
        ids: Number of the row of each image.
    """

    def __init__(
        self,
        rows: Any,
        column: str,
        labels: Labels,
        size: int,
        ids: NDArray[np.int64],
        crop: bool = False,
    ) -> None:
        super().__init__(labels, size, crop)
        self._rows, self._column, self._ids = rows, column, ids

    def part(self, ids: NDArray[np.int64]) -> HubSplit:
        rows = self._ids[ids]
        return HubSplit(self._rows, self._column, self.labels[ids], self.size, rows, self._crop)

    def _read(self, ids: NDArray[np.int64]) -> Sequence[Any]:
        cells: Sequence[Any] = self._rows[self._ids[ids].tolist()][self._column]
        return cells

    def _open(self, sample: Any) -> File:
        content = sample["bytes"]
        return BytesIO(content) if content is not None else Path(sample["path"])

    def _unreadable(self, number: int, sample: Any, error: Exception) -> DataError:
        return DataError(
            f"row {self._ids[number]} of the data set holds no readable image", found=str(error)
        )


def matches(folder: Path) -> bool:
    """True for a data set that was saved to disk, or a folder of parquet files."""
    return (
        is_saved(folder)
        or any(folder.glob("[!.]*.parquet"))
        or any(folder.glob("data/[!.]*.parquet"))
    )


def read(folder: Path | str, options: ImageOptions) -> ImageData:
    """Finds the columns, and splits the training part if there is no other.

    Raises:
        DataError: The data set is not found or has no images and class labels.
        SettingError: --skip-damaged, which needs files.
    """
    if options.skip_damaged:
        raise SettingError(
            f"--skip-damaged has no effect with --data {options.data}",
            found="the rows of a Hugging Face data set are not checked at the start",
            remedy="a folder of image files or tar shards, or leave --skip-damaged out",
        )
    parts = load_rows(str(folder), options.data_config, options.offline)
    image, label = _columns(str(folder), parts["train"].features)
    labels = {name: np.array(rows[label], dtype=np.int64) for name, rows in parts.items()}
    if (names := getattr(parts["train"].features[label], "names", None)) is None:
        names = class_names(
            Path(folder), max(int(values.max(initial=-1)) for values in labels.values())
        )
    classes = tuple(str(values) for values in names)
    # Public benchmarks hide the labels of their test part as -1.
    usable = [name for name in parts if labels[name].min(initial=0) >= 0]
    size = options.image_size or DEFAULT_SIZE
    as_file = library("datasets", "images are read").Image(decode=False)  # with a limit on its size
    splits = {
        name: HubSplit(
            parts[name].cast_column(image, as_file), image, labels[name], size,
            np.arange(len(labels[name])), options.crop,
        )
        for name in usable
    }  # fmt: skip
    split_info: SplitInfo = {"method": "as in the files"}
    if usable == ["train"]:
        ids, split_info = split_seeded(labels["train"], options)
        splits = {name: splits["train"].part(part) for name, part in ids.items()}
    digest = fingerprint([str(folder).encode(), *(labels[name] for name in sorted(usable))])
    return ImageData(options.data, classes, (3, size, size), splits, digest, split_info)


def _columns(name: str, features: Mapping[str, Any]) -> tuple[str, str]:
    """Finds the columns of images and classes by type, else by the names in webdataset shards."""
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    image, label = (
        next((c for c, k in kinds.items() if k == wanted_kind), "")
        for wanted_kind in ("Image", "ClassLabel")
    )
    types = {column: str(getattr(value, "dtype", "")) for column, value in features.items()}
    encoded = (c for c, t in types.items() if "." + c.lower() in SUFFIXES and "binary" in t)
    image = image or next(encoded, "")
    label = label or ("cls" if "int" in types.get("cls", "") else "")
    if not (image and label):
        raise DataError(
            f"--data {name} is not a data set of images with class labels",
            found=", ".join(f"{column}: {kind}" for column, kind in kinds.items()),
            remedy="columns of the kinds Image and ClassLabel, or png (bytes) and cls (a number)",
        )
    return image, label
