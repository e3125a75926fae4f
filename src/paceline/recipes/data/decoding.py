"""Decoding of image files: resizing, random crops, data sets that decode on demand."""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from torch.utils.data import get_worker_info

from paceline.recipes.data.images import Labels, Pixels, Randoms
from paceline.spec.errors import DataError
from paceline.spec.formatting import pluralize
from paceline.train.data.fetch import usable_cpus

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
File = Path | IO[bytes]
SUFFIXES = frozenset(
    (
        *(".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".webp"),
        *(".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"),
    )
)
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Formats of ``SUFFIXES``. Pillow detects others by their content; one of them starts programs."""
MAX_PIXELS = 32_000_000
"""Limit for an image file: a small one may decompress to gigabytes."""
_REDUCING_GAP = 2.0
"""JPEGs are decoded at a reduced size that is at least this factor larger than the result. The
difference is invisible, and a photo of twelve megapixels takes half the time."""
_MIN_PARALLEL = 8
_CHUNK = 512  # samples that are read at once to check them

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How to turn the stored pixels of a photo upright, by its EXIF orientation."""
_SWAPS_AXES = range(5, 9)

CROP_AREA = (0.08, 1.0)  # fraction of the image that a random crop takes
CROP_ASPECT = (3 / 4, 4 / 3)  # width over height of a random crop
CROP_ATTEMPTS = 10
CROP_RANDOMS = 4 * CROP_ATTEMPTS
"""Random numbers of each crop."""
Box = tuple[float, float, float, float]


def _open(file: File) -> Image.Image:
    """Opens an image file; OSError if it is not a regular file: a named pipe would block."""
    if isinstance(file, Path) and not stat.S_ISREG(file.stat().st_mode):
        raise OSError("it is not a regular file")
    return Image.open(file, formats=_FORMATS)


@contextmanager
def open_image(file: File) -> Iterator[Image.Image]:
    """Opens an image file without decoding its pixels.

    Raises:
        ValueError: It would need too much memory.
    """
    with _open(file) as image:
        _reduce(image, image.size)
        yield image


def _reduce(image: Image.Image, size: tuple[float, float]) -> None:
    """Reduces what is decoded to what resizing the whole image to ``size`` (width, height) needs.

    Raises:
        ValueError: It would need too much memory.
    """
    large_enough = [
        by
        for by in (8, 4, 2, 1)  # a JPEG can be decoded at these fractions of its size
        if image.width >= by * _REDUCING_GAP * size[0]
        and image.height >= by * _REDUCING_GAP * size[1]
    ]
    needed = [by for by in (1, 2, 4, 8) if image.width * image.height <= by**2 * MAX_PIXELS]
    by = max((*large_enough[:1], *needed[:1]), default=8)
    if by > 1:
        image.draft(None, (max(1, image.width // by), max(1, image.height // by)))
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"{image.width} × {image.height} pixels, more than the {MAX_PIXELS // 1_000_000}"
            " million that are decoded"
        )


def decode_resized(file: File, channels: int, size: tuple[int, int], crop: bool) -> Pixels:
    """Decodes the whole image to an array of shape ``[channels, height, width]``.

    Args:
        channels: 1 or 3.
        size: Width and height.
        crop: Crop the centre of images with another aspect ratio instead of squeezing them.
    """
    with _open(file) as image:
        _reduce(image, size)
        converted = _convert(image, "L" if channels == 1 else "RGB")
        orientation = _orientation(image)
        size = size[::-1] if orientation in _SWAPS_AXES else size
        if converted.size != size and crop:
            converted = ImageOps.fit(converted, size, Image.Resampling.BILINEAR)
        elif converted.size != size:
            converted = converted.resize(
                size, Image.Resampling.BILINEAR, reducing_gap=_REDUCING_GAP
            )
    return _pixels(converted, orientation)


def random_crop(file: File, randoms: NDArray[np.float64], size: int) -> Pixels:
    """Decodes a random part of the image to an array of shape ``[3, size, size]``.

    ``randoms`` are ``CROP_RANDOMS`` uniform numbers in [0, 1), which determine the part.
    """
    with _open(file) as image:
        width, height = image.size
        left, top, right, bottom = crop_box(width, height, randoms)
        _reduce(image, (width * size / (right - left), height * size / (bottom - top)))
        x_scale, y_scale = image.width / width, image.height / height  # less than 1 if reduced
        box = left * x_scale, top * y_scale, right * x_scale, bottom * y_scale
        cropped = _convert(image, "RGB").resize(
            (size, size), Image.Resampling.BILINEAR, box=box, reducing_gap=_REDUCING_GAP
        )
        return _pixels(cropped, _orientation(image))


def crop_box(width: int, height: int, randoms: NDArray[np.float64]) -> Box:
    """Returns left, top, right and bottom of a part of 8 to 100 percent of the area, in pixels.

    If ten attempts do not fit into the image, takes the largest centred box of an allowed aspect
    ratio.
    """
    low, high = math.log(CROP_ASPECT[0]), math.log(CROP_ASPECT[1])
    for area, shape, x, y in randoms.reshape(CROP_ATTEMPTS, 4).tolist():
        target_area = width * height * (CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * area)
        aspect = math.exp(low + (high - low) * shape)
        crop_width = round(math.sqrt(target_area * aspect))
        crop_height = round(math.sqrt(target_area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = int((width - crop_width + 1) * x), int((height - crop_height + 1) * y)
            return left, top, left + crop_width, top + crop_height
    crop_width = max(1, min(width, round(height * CROP_ASPECT[1])))
    crop_height = max(1, min(height, round(width / CROP_ASPECT[0])))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def _convert(image: Image.Image, mode: str) -> Image.Image:
    """Decodes an image to 8 bits per channel, with what is transparent on white.

    The scale depends on the format and not on the values: pictures of a set stay comparable.

    Raises:
        ValueError: Nothing says which values are black and white.
    """
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "I":
        image = Image.fromarray(_scaled_integers(image))
    elif image.mode == "F":
        image = Image.fromarray(_scaled_floats(image))
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert(mode)


def _scaled_integers(image: Image.Image) -> Pixels:
    """Converts mode ``I``, in which Pillow opens PGM and in old versions PNG files of 16 bits."""
    if image.format not in ("PNG", "PPM"):
        raise ValueError(
            "signed or 32-bit integers, of which nothing says what is white; save them as 8 or"
            " unsigned 16 bits"
        )
    return (np.asarray(image) >> 8).astype(np.uint8)


def _scaled_floats(image: Image.Image) -> Pixels:
    values = np.asarray(image)
    if not (values.min() >= 0 and values.max() <= 1):  # also refuses NaN
        raise ValueError(
            f"floating-point values from {values.min():g} to {values.max():g}; scale them to 0…1,"
            " or save them as 8 or unsigned 16 bits"
        )
    return (values * 255).round().astype(np.uint8)


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation that the decoded pixels still have; 1 is upright."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged metadata may raise anything, and leave the picture readable
        return 1


def _pixels(image: Image.Image, orientation: int) -> Pixels:
    turn = _TURNS.get(orientation)
    pixels = np.array(image if turn is None else image.transpose(turn), dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


_SYSTEM_FILES = frozenset(
    {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir", "$recycle.bin"}
    | {"system volume information", "lost+found"}
)


def is_system_file(path: Path) -> bool:
    """Tells whether a file, relative to the data's folder, was left by a system or an editor.

    These are hidden files, ``__MACOSX``, ``Thumbs.db`` and the like, and what lies in such folders.
    """
    return any(name.startswith(".") or name.lower() in _SYSTEM_FILES for name in path.parts)


def image_files(folder: Path) -> list[Path]:
    """Lists the images below a folder, sorted by name, without system files.

    Files with the name of an image count even if they are damaged. Files whose names have no suffix
    count if they hold an image.
    """
    try:
        return sorted(
            path
            for path in folder.rglob("*")
            if not is_system_file(path.relative_to(folder))
            and (path.suffix.lower() in SUFFIXES or (not path.suffix and _is_image(path)))
        )
    except RecursionError:
        raise DataError(f"{folder} holds folders that are nested too deep") from None


def _is_image(path: Path) -> bool:
    try:
        with _open(path):
            return True
    except Exception:  # a folder, another file, or a damaged image, which may raise anything
        return False


def unread_files(folder: Path, images: Collection[Path]) -> list[Path]:
    """Lists the files below a folder that are neither these images nor system files, sorted."""
    known = {*images}
    return sorted(
        path
        for path in folder.rglob("*")
        if path not in known and not is_system_file(path.relative_to(folder)) and path.is_file()
    )


def describe_unread_files(paths: Sequence[Path]) -> str:
    """Counts files that are left out, and names one; empty if there are none."""
    return f"{pluralize(len(paths), 'other file')}, such as {paths[0]}" if paths else ""


def unreadable_error(
    path: Path, error: Exception, remedy: str = "replace or remove the file, or --skip-damaged"
) -> DataError:
    """Returns the error of a file that could not be decoded."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path}: no such file", found=f"looked in {path.absolute().parent}",
                         remedy=remedy)  # fmt: skip
    size = f"{path.stat().st_size} bytes; " if path.exists() else ""
    return DataError(
        f"{path} is not a readable image",
        found=f"{size}{error or type(error).__name__}",
        remedy=remedy,
    )


def map_parallel(make: Callable[[T], Pixels], items: Sequence[T]) -> list[Pixels]:
    """Maps ``make`` over items in threads; without threads in a loader's worker process."""
    if len(items) < _MIN_PARALLEL or usable_cpus() == 1 or get_worker_info() is not None:
        return [make(item) for item in items]
    with ThreadPoolExecutor(usable_cpus()) as pool:
        return list(pool.map(make, items))


class FileSplit:
    """Images that are decoded from files on demand, each at its own size.

    Args:
        labels: Class number of each image.
        size: Height and width to which images are resized.
        crop: Crop the centre of images with another aspect ratio instead of squeezing them.
    """

    processes = True  # nothing is cached, so batches may be made in several processes

    def __init__(self, labels: Labels, size: int, crop: bool) -> None:
        self.labels, self.size, self._crop = labels, size, crop

    def part(self, ids: NDArray[np.int64]) -> Self:
        """Returns some of the images, in this order."""
        raise NotImplementedError

    def readable(self) -> Self:
        """Returns the images that can be decoded completely; DataError if there are none."""
        chunks = np.array_split(np.arange(len(self.labels)), -(-len(self.labels) // _CHUNK) or 1)
        with ThreadPoolExecutor(usable_cpus()) as pool:
            mask = [ok for ids in chunks for ok in pool.map(self._is_readable, self._read(ids))]
        if not any(mask):
            raise DataError(f"none of the {len(mask)} images can be read")
        return self.part(np.flatnonzero(mask))

    def _is_readable(self, sample: Any) -> bool:
        try:
            with open_image(self._open(sample)) as image:
                _convert(image, "RGB")
        except Exception:  # a damaged image may raise anything
            return False
        return True

    def pixels(self, ids: NDArray[np.int64]) -> Pixels:
        """Decodes images to shape ``[len(ids), 3, size, size]``; DataError if one is damaged."""
        size = (self.size, self.size)
        return self._decode(ids, lambda _, file: decode_resized(file, 3, size, self._crop))

    def random_crops(self, ids: NDArray[np.int64], randoms: Randoms, size: int) -> Pixels:
        """Decodes a random part of each image, with ``CROP_RANDOMS`` random numbers for each."""
        return self._decode(ids, lambda place, file: random_crop(file, randoms[place], size))

    def _decode(self, ids: NDArray[np.int64], transform: Callable[[int, File], Pixels]) -> Pixels:
        samples = self._read(ids)

        def decode_image(place: int) -> Pixels:
            try:
                return transform(place, self._open(samples[place]))
            except Exception as error:  # a damaged image may raise anything
                raise self._unreadable(int(ids[place]), samples[place], error) from None

        return np.stack(map_parallel(decode_image, range(len(samples))))

    def _read(self, ids: NDArray[np.int64]) -> Sequence[Any]:
        """Returns what the data set holds for each image."""
        raise NotImplementedError

    def _open(self, sample: Any) -> File:
        raise NotImplementedError

    def _unreadable(self, number: int, sample: Any, error: Exception) -> DataError:
        raise NotImplementedError
