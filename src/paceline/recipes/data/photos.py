"""Image files: what of them is decoded, brought to a size, or cut out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.utils.data import get_worker_info

from paceline.recipes.data.images import Pixels
from paceline.spec.errors import DataError
from paceline.train.data import allowed

T = TypeVar("T")
File = Path | IO[bytes]
SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Those of ``SUFFIXES``: others would be told by their content, and one of them starts programs."""
MOST_PIXELS = 32_000_000
"""Of an image file: a small one may stand for gigabytes."""
_GAP = 2.0
"""A JPEG is decoded at a part of its size that is so many times what is wanted, or more: nobody
sees the difference, and a photo of twelve million pixels takes half the time."""
_WORTH_THREADS = 8

AREA = (0.08, 1.0)  # part of the image that ``cut_out`` takes
ASPECT = (3 / 4, 4 / 3)  # of that part: width over height
TRIES = 10
NUMBERS = 4 * TRIES
"""Random numbers that a cut takes."""
Box = tuple[float, float, float, float]


@contextmanager
def opened(file: File) -> Iterator[Image.Image]:
    """An image file whose pixels are not decoded yet.

    Raises:
        ValueError: It would need too much memory.
    """
    with Image.open(file, formats=_FORMATS) as image:
        _limit(image, image.size)
        yield image


def _limit(image: Image.Image, size: tuple[float, float]) -> None:
    """Has no more decoded than is needed to bring the whole image to ``size`` (width, height).

    Raises:
        ValueError: It would need too much memory.
    """
    enough = [
        by
        for by in (8, 4, 2, 1)  # the parts of its size at which a JPEG can be decoded
        if image.width >= by * _GAP * size[0] and image.height >= by * _GAP * size[1]
    ]
    needed = [by for by in (1, 2, 4, 8) if image.width * image.height <= by**2 * MOST_PIXELS]
    by = max((*enough[:1], *needed[:1]), default=8)
    if by > 1:
        image.draft(None, (max(1, image.width // by), max(1, image.height // by)))
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(
            f"{image.width} × {image.height} pixels, more than the {MOST_PIXELS // 1_000_000}"
            " million that are decoded"
        )


def sized(file: File, channels: int, size: tuple[int, int], crop: bool) -> Pixels:
    """The whole image as an array of shape ``[channels, height, width]``.

    Args:
        file: The file, or its content.
        channels: 1 or 3.
        size: Width and height.
        crop: Cuts the middle out of a file of another aspect, instead of squeezing it.
    """
    with Image.open(file, formats=_FORMATS) as image:
        _limit(image, size)
        made = image.convert("L" if channels == 1 else "RGB")
        if made.size != size and crop:
            made = ImageOps.fit(made, size, Image.Resampling.BILINEAR)
        elif made.size != size:
            made = made.resize(size, Image.Resampling.BILINEAR, reducing_gap=_GAP)
    return _pixels(made)


def cut_out(file: File, numbers: NDArray[np.float64], size: int) -> Pixels:
    """A random part of the whole image, ``size`` high and wide: shape ``[3, size, size]``.

    Args:
        file: The file, or its content.
        numbers: ``NUMBERS`` uniform ones in [0, 1), which decide everything.
        size: In pixels.
    """
    with Image.open(file, formats=_FORMATS) as image:
        width, height = image.size
        left, top, right, bottom = window(width, height, numbers)
        _limit(image, (width * size / (right - left), height * size / (bottom - top)))
        across, down = image.width / width, image.height / height  # 1, or less where reduced
        box = left * across, top * down, right * across, bottom * down
        made = image.convert("RGB").resize(
            (size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=_GAP
        )
    return _pixels(made)


def window(width: int, height: int, numbers: NDArray[np.float64]) -> Box:
    """Left, top, right and bottom of a part of 8 to 100 percent of the area, in whole pixels.

    Where ten drawn ones do not lie within the image, the largest in its middle of an allowed
    aspect.
    """
    low, high = math.log(ASPECT[0]), math.log(ASPECT[1])
    for area, form, across, down in numbers.reshape(TRIES, 4).tolist():
        wanted = width * height * (AREA[0] + (AREA[1] - AREA[0]) * area)
        aspect = math.exp(low + (high - low) * form)
        wide, tall = round(math.sqrt(wanted * aspect)), round(math.sqrt(wanted / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            left, top = int((width - wide + 1) * across), int((height - tall + 1) * down)
            return left, top, left + wide, top + tall
    wide = max(1, min(width, round(height * ASPECT[1])))
    tall = max(1, min(height, round(width / ASPECT[0])))
    left, top = (width - wide) // 2, (height - tall) // 2
    return left, top, left + wide, top + tall


def _pixels(image: Image.Image) -> Pixels:
    pixels = np.array(image, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


_LITTER = frozenset(
    {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir", "$recycle.bin"}
    | {"system volume information", "lost+found"}
)


def is_litter(path: Path) -> bool:
    """Whether operating systems or editors left it: hidden, ``__MACOSX``, ``Thumbs.db``, …

    Args:
        path: Relative to the data's folder; what lies in such a folder is litter, too.
    """
    return any(name.startswith(".") or name.lower() in _LITTER for name in path.parts)


def image_files(folder: Path) -> list[Path]:
    """The images below a folder, in the order of their names, without litter."""
    try:
        return sorted(
            path
            for path in folder.rglob("*")
            if path.suffix.lower() in SUFFIXES and not is_litter(path.relative_to(folder))
        )
    except RecursionError:
        raise DataError(f"{folder} holds folders that are nested too deep") from None


SKIP = "replace or remove the file, or --skip-damaged"


def decode(
    path: Path, channels: int, height: int, width: int, crop: bool = False, remedy: str = SKIP
) -> Pixels:
    """An image file as an array of shape ``[channels, height, width]``; see :func:`sized`.

    Args:
        path: The file.
        channels, height, width: Of what comes out.
        crop: Cuts the middle out of a file of another aspect, instead of squeezing it.
        remedy: What to do about a file that cannot be read.

    Raises:
        DataError: The file is missing, damaged or no image.
    """
    try:
        return sized(path, channels, (width, height), crop)
    except Exception as error:  # a damaged image may raise anything
        raise unreadable(path, error, remedy) from None


def unreadable(path: Path, error: Exception, remedy: str = SKIP) -> DataError:
    """What to tell of a file that could not be decoded."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path}: no such file", found=f"looked in {path.absolute().parent}",
                         remedy=remedy)  # fmt: skip
    size = f"{path.stat().st_size} bytes; " if path.exists() else ""
    return DataError(
        f"{path} is no readable image",
        found=f"{size}{error or type(error).__name__}",
        remedy=remedy,
    )


def side_by_side(make: Callable[[T], Pixels], items: Sequence[T]) -> list[Pixels]:
    """One array for each item; in threads, for decoding lets other threads run.

    Not in a worker process: there are others beside it.
    """
    if len(items) < _WORTH_THREADS or allowed() == 1 or get_worker_info() is not None:
        return [make(item) for item in items]
    with ThreadPoolExecutor(allowed()) as pool:
        return list(pool.map(make, items))
