"""The IDX format of MNIST and similar data sets, plain or with gzip."""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.data import IMAGE_SETS
from paceline.recipes.data.images import ImageData, InMemory, check_labels, in_memory
from paceline.recipes.options import ImageOptions
from paceline.spec.errors import DataError
from paceline.train import files

_TRAIN, _TEST = "train", "t10k"
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


_HEADER_BYTES = 16  # of images; that of labels has 8 bytes
_MAX_BYTES = 1 << 30


def matches(folder: Path) -> bool:
    """True if the folder holds training images in this format."""
    return _find_file(folder, _TRAIN, _IMAGES) is not None


def read(folder: Path, options: ImageOptions) -> ImageData:
    """Reads the four files.

    Raises:
        DataError: A file is missing, truncated or of another format, or a label out of range.
    """
    dataset = IMAGE_SETS.get(options.data)
    classes = dataset.classes if dataset else _class_names(folder)
    train = _part(folder, _TRAIN, len(classes))
    return in_memory(options, classes, train, _part(folder, _TEST, len(classes)))


def _class_names(folder: Path) -> tuple[str, ...]:
    labels = _array(_file(folder, _TRAIN, _LABELS), 1)
    return tuple(str(number) for number in range(int(labels.max(initial=0)) + 1))


def _part(folder: Path, part: str, classes: int) -> InMemory:
    images = _array(_file(folder, part, _IMAGES), 3)
    labels_file = _file(folder, part, _LABELS)
    labels = _array(labels_file, 1).astype(np.int64)
    check_labels(labels_file, labels, len(images), classes)
    if not len(images):
        raise DataError(f"{_file(folder, part, _IMAGES)} holds no images")
    return InMemory(images[:, None], labels)


def _file(folder: Path, part: str, kind: str) -> Path:
    path = _find_file(folder, part, kind)
    if path is None:
        raise DataError(
            f"{folder} lacks a file of the data set",
            found=f"no {part}-{kind} and no {part}-{kind}.gz",
            remedy="put all four IDX files into that folder",
        )
    return path


def _find_file(folder: Path, part: str, kind: str) -> Path | None:
    names = (f"{part}-{kind}", f"{part}-{kind}.gz", f"{part}-{kind.replace('-idx', '.idx')}")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    try:
        content = files.read_bytes_limited(path, files.max_content_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read", found=str(error)) from None
    if path.suffix == ".gz":
        content = _decompress(path, content)
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(
            f"{path} is not an IDX file of {dimensions} dimension{'s' * (dimensions > 1)}",
            found=f"{len(content)} bytes that begin with {content[:4].hex(' ') or 'nothing'},"
            f" expected 00 00 08 0{dimensions}",
            remedy="get the file again",
        )
    shape = np.frombuffer(content, ">u4", dimensions, 4).astype(int)
    expected = header + math.prod(shape.tolist())
    if len(content) != expected:
        raise DataError(
            f"{path} is truncated or damaged",
            found=f"expected {expected} bytes of content, found {len(content)}",
            remedy="get the file again",
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _decompress(path: Path, raw: bytes) -> bytes:
    """Decompresses a file; a truncated one gives what there is, checked against the IDX header."""
    unpack = zlib.decompressobj(wbits=31)
    try:
        # Decompress no more than the header announces: a small file may expand to any size.
        head = unpack.decompress(raw, _HEADER_BYTES)
        sizes = np.frombuffer(head, ">u4", len(head) // 4)[1:][: head[3] if len(head) > 3 else 0]
        limit = math.prod(sizes.tolist()) + _HEADER_BYTES
        if limit > _MAX_BYTES:
            raise DataError(
                f"{path} announces {limit:,} bytes",
                found=f"{len(raw):,} bytes, packed; at most {_MAX_BYTES:,} are read",
                remedy="get the file again",
            )
        return head + unpack.decompress(unpack.unconsumed_tail, limit)
    except zlib.error as error:
        raise DataError(
            f"{path} is damaged",
            found=f"{len(raw)} bytes that are not valid gzip data: {error}",
            remedy="get the file again",
        ) from None
