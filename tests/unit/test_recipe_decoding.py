"""Tests that image files of any mode and orientation are decoded to what a viewer shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.recipes.data import decoding, folder
from paceline.recipes.options import ImageOptions
from paceline.spec.errors import DataError

GREY = np.array([[0, 51], [102, 255]], np.uint8)
COLOURS = np.stack([GREY, GREY.T, 255 - GREY], axis=2)
WHOLE = np.zeros(decoding.CROP_RANDOMS)
WHOLE[:2] = 1, 0.5
"""Random numbers of a crop that is the whole of a square image."""


def decode(path: Path, channels: int = 3) -> Any:
    return decoding.decode_resized(path, channels, (2, 2), crop=False)


@pytest.mark.parametrize("name", ["deep.png", "deep.tif", "deep.pgm"])
def test_16_bit_grey_is_scaled_to_8_bits(tmp_path: Path, name: str) -> None:
    Image.fromarray(GREY.astype(np.uint16) * 257).save(tmp_path / name)
    assert np.array_equal(decode(tmp_path / name, channels=1)[0], GREY)
    assert np.array_equal(decode(tmp_path / name), [GREY] * 3)
    crop = decoding.random_crop(tmp_path / name, WHOLE, 2)
    assert np.array_equal(crop, [GREY] * 3)


def test_big_endian_tiff_is_scaled_to_8_bits(tmp_path: Path) -> None:
    image = Image.frombytes("I;16B", (2, 2), (GREY.astype(">u2") * 257).tobytes())
    image.save(tmp_path / "a.tif")
    assert np.array_equal(decode(tmp_path / "a.tif", channels=1)[0], GREY)


def test_floats_from_0_to_1_are_scaled(tmp_path: Path) -> None:
    Image.fromarray(GREY.astype(np.float32) / 255).save(tmp_path / "a.tif")
    assert np.array_equal(decode(tmp_path / "a.tif", channels=1)[0], GREY)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (GREY.astype(np.float32), "values from 0 to 255; scale them to 0…1"),
        (np.full((2, 2), np.nan, np.float32), "values from nan to nan"),
        (GREY.astype(np.float32) / 255 - 0.5, "values from -0.5 to 0.5"),
        (GREY.astype(np.int32), "32-bit integers, of which nothing says what is white"),
    ],
)
def test_values_without_a_range_are_refused_by_name(
    tmp_path: Path, values: Any, reason: str
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.fromarray(GREY).save(tmp_path / name / f"{number}.png")
    Image.fromarray(values).save(tmp_path / "cat/x.tif")
    options = ImageOptions(data=str(tmp_path), image_size=8, test_fraction=0.5)
    splits = folder.read(tmp_path, options).splits.values()
    split = next(split for split in splits if tmp_path / "cat/x.tif" in split.paths)
    with pytest.raises(DataError, match=r"cat/x\.tif is not a readable image") as caught:
        split.pixels(np.arange(len(split.labels)))
    assert reason in (caught.value.found or "")
    skipping = ImageOptions(data=str(tmp_path), image_size=8, skip_damaged=True)
    assert folder.read(tmp_path, skipping).damaged == 1


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_opaque_modes_keep_their_colours(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(COLOURS).convert(mode)
    path = tmp_path / f"a.{'png' if mode in '1LP' else 'tif'}"
    image.save(path)
    expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(decode(path), expected)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_white(tmp_path: Path, mode: str) -> None:
    """Icons are often black on transparent black."""
    alpha = np.array([[255, 0], [0, 255]], np.uint8)
    icon = Image.fromarray(np.dstack([np.zeros((2, 2, 3), np.uint8), alpha]))
    path = tmp_path / "icon.png"
    if mode == "P":
        icon = Image.fromarray(alpha // 255).convert("P")
        icon.putpalette([0, 0, 0] * 2)
        icon.save(path, transparency=0)
    else:
        icon.convert(mode).save(path)
    assert np.array_equal(decode(path), [255 - alpha] * 3)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, name: str, orientation: int) -> None:
    y, x = np.mgrid[0:64, 0:64]
    upright = np.stack([x * 4, y * 4, (x < 32) * 200], axis=2).astype(np.uint8)
    back = {value: key for key, value in ((6, 8), (8, 6))}.get(orientation, orientation)
    stored = Image.fromarray(upright)
    if back in decoding._TURNS:
        stored = stored.transpose(decoding._TURNS[back])
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / name, exif=exif)
    for size in ((16, 16), (24, 16)):
        decoded = decoding.decode_resized(tmp_path / name, 3, size, crop=False)
        expected = Image.fromarray(upright).resize(size, Image.Resampling.BILINEAR)
        difference = decoded - np.asarray(expected).transpose(2, 0, 1).astype(float)
        assert np.abs(difference).mean() < 6
    turned = decoding.random_crop(tmp_path / name, WHOLE, 64).astype(float)
    assert np.abs(turned - upright.transpose(2, 0, 1)).mean() < 6


def test_damaged_exif_leaves_photo_readable(tmp_path: Path) -> None:
    image = Image.fromarray(COLOURS)
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "b.png", exif=b"Exif\0\0no TIFF header")
    assert np.array_equal(decode(tmp_path / "a.png"), decode(tmp_path / "b.png"))
