"""Tests that crops of photos come from the full file and depend only on random numbers."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.recipes import image
from paceline.recipes.data import decoding, folder, tars
from paceline.recipes.data.images import load
from paceline.recipes.data.texts import load_texts
from paceline.recipes.options import ImageOptions, TextOptions
from paceline.recipes.preprocessing import ImageTensors, Normalisation
from paceline.spec.errors import DataError
from paceline.train import Draws, write_shards
from paceline.train.data.fetch import BatchRequest, Fetch


def test_random_crops_use_full_resolution(tmp_path: Path) -> None:
    """Crops do not come from a smaller copy, and are equal in every process that makes them."""
    y, x = np.mgrid[0:400, 0:500]
    ramp = np.stack([x / 2, y / 2, (x % 2) * 255], axis=2).astype(np.uint8)
    Image.fromarray(ramp).save(tmp_path / "photo.png")
    files = folder.FolderSplit([tmp_path / "photo.png"] * 9, np.zeros(9, dtype=np.int64), 64)
    numbers = Draws(0, 0, np.arange(9)).uniform(decoding.CROP_RANDOMS)
    produced = files.random_crops(np.arange(9), numbers, 64)
    for pixels, drawn in zip(produced.astype(float), numbers, strict=True):
        left, top, right, bottom = decoding.crop_box(500, 400, drawn)
        middle = (left + right) / 4, (top + bottom) / 4
        assert abs(pixels[0].mean() - middle[0]) < 1
        assert abs(pixels[1].mean() - middle[1]) < 1
        if right - left < 80:  # the crop is not enlarged: one pixel of the file is one pixel of it
            assert pixels[2].std() > 60
    parts = np.concatenate(
        [files.random_crops(np.array([i]), numbers[i : i + 1], 64) for i in range(9)]
    )
    assert np.array_equal(produced, parts)


def test_crop_box_distribution() -> None:
    drawn = np.random.default_rng(0).random((2000, decoding.CROP_RANDOMS))
    boxes = np.array([decoding.crop_box(500, 400, item) for item in drawn])
    wide, tall = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (boxes.min(0) >= 0).all()
    assert (boxes.max(0) <= [500, 400, 500, 400]).all()
    area = wide * tall / 200_000
    assert 0.079 < area.min() < 0.1 < 0.95 < area.max() <= 1
    assert 0.74 < (wide / tall).min() < 0.8 < 1.25 < (wide / tall).max() < 1.35
    assert decoding.crop_box(900, 100, np.full(decoding.CROP_RANDOMS, 0.99)) == (383, 0, 516, 100)


def test_large_jpegs_are_decoded_at_reduced_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reduced size is enough for small crops; a file above the limit is then accepted, too."""
    y, x = np.mgrid[0:800, 0:1000]
    photo = Image.fromarray(np.stack([x / 4, y / 4, x * 0], axis=2).astype(np.uint8))
    photo.save(tmp_path / "a.png")
    photo.save(tmp_path / "a.jpg", quality=95)
    loaded: list[tuple[int, int]] = []
    convert = Image.Image.convert
    monkeypatch.setattr(
        Image.Image, "convert", lambda item, mode: loaded.append(item.size) or convert(item, mode)
    )
    numbers = np.zeros(decoding.CROP_RANDOMS)
    numbers[:4] = 0.9, 0.89, 0.5, 0.5  # a crop of 952 × 762 from the 1000 × 800
    for limit in (32_000_000, 60_000):
        monkeypatch.setattr(decoding, "MAX_PIXELS", limit)
        resized = decoding.decode_resized(tmp_path / "a.jpg", 3, (64, 64), crop=True)
        cut = decoding.random_crop(tmp_path / "a.jpg", numbers, 64)
        if limit > 1e6:
            exact = decoding.decode_resized(tmp_path / "a.png", 3, (64, 64), crop=True)
            part = decoding.random_crop(tmp_path / "a.png", numbers, 64)
        assert np.abs(resized.astype(int) - exact).mean() < 2
        assert np.abs(cut.astype(int) - part).mean() < 2
    assert loaded == [(250, 200), (250, 200), (1000, 800), (1000, 800), (250, 200), (250, 200)]
    with pytest.raises(ValueError, match="1000 × 800 pixels, more than"):
        decoding.decode_resized(tmp_path / "a.png", 3, (64, 64), crop=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_produce_identical_photo_batches(tmp_path: Path, workers: int) -> None:
    draw = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(12):
            pixels = draw.integers(0, 256, (40, 60, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    data = folder.read(tmp_path, ImageOptions(image_size=32, augment=("resized-crop",)))
    normalise = Normalisation((0.5,) * 3, (0.25,) * 3)
    pictures = ImageTensors(
        data.splits["train"], normalise, torch.float32, ("resized-crop", "flip")
    )
    orders = [
        BatchRequest(np.arange(i, i + 4), Draws(1, 2, np.arange(i, i + 4)), i)
        for i in range(0, 16, 4)
    ]
    fetch = Fetch(pictures, torch.device("cpu"), workers)
    produced = [images for _, (images, _) in fetch(orders)]
    fetch.close()
    for item, images in zip(orders, produced, strict=True):
        reference = pictures.on_device(pictures.batch(item.ids, item.draws), item.draws)[0]
        assert torch.equal(images, reference)
    assert produced[0].shape == (4, 3, 32, 32)
    unaugmented = pictures.on_device(pictures.batch(orders[0].ids, None), None)[0]
    assert not torch.equal(produced[0], unaugmented)


# -- in shards ---------------------------------------------------------------------------------


def png(shade: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(shade).integers(0, 99, (20, 30, 3)) + 100 * (shade % 2)
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def samples(count: int) -> Iterator[dict[str, Any]]:
    return ({"png": png(number), "cls": number % 2} for number in range(count))


def read(folder: Path, **extra: Any) -> Any:
    return load(ImageOptions(data=str(folder), image_size=16, augment=("resized-crop",), **extra))


def test_photos_in_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, samples(40), size=30_000)
    (tmp_path / "classes.txt").write_text("dark\nlight\n")
    data = read(tmp_path)
    assert data.classes == ("dark", "light")
    assert {name: len(part.labels) for name, part in data.splits.items()} == {
        "train": 32,
        "test": 8,
    }
    train = data.splits["train"]
    (tmp_path / "one.png").write_bytes(png(int(train._ids[5])))
    reference = decoding.decode_resized(tmp_path / "one.png", 3, (16, 16), crop=True)
    assert np.array_equal(train.pixels(np.array([5]))[0], reference)
    assert data.fingerprint == read(tmp_path).fingerprint != read(tmp_path, seed=1).fingerprint
    part = read(tmp_path, val_fraction=0.25).splits["train"]
    order = ImageTensors(part, Normalisation((0.5,) * 3, (0.2,) * 3), torch.float32).visiting_order(
        0, True
    )
    assert sorted(order.epoch(0).tolist()) == list(range(len(part.labels)))
    assert len(order.shard_sizes) == len([*tmp_path.glob("*.tar")]) > 3


def test_shard_names_define_splits(tmp_path: Path) -> None:
    write_shards(tmp_path / "a/train", samples(8))
    write_shards(tmp_path / "a/val", samples(4))
    for number, name in enumerate(("train-0", "test_0", "eval-0")):
        write_shards(tmp_path / f"b{number}", samples(4 + number))
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / f"b{number}/00000.tar").rename(tmp_path / f"b/{name}.tar")
    for name, parts in (("a", {"train": 8, "val": 4}), ("b", {"train": 4, "test": 5})):
        found = read(tmp_path / name).splits
        assert {split: len(part.labels) for split, part in found.items()} == parts
    assert not tars.matches(tmp_path)


def test_rejects_invalid_photo_shards(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", [*samples(6), {"png": png(1)}])
    with pytest.raises(DataError, match=r"00000\.tar: 000000006 has no class\n.*1 of 7 samples"):
        read(tmp_path / "a")
    broken = {"png": png(1)[:200], "cls": 1}
    write_shards(tmp_path / "b", [*samples(9), broken, {"txt": "none", "cls": 0}])
    train = read(tmp_path / "b", test_fraction=0.1).splits["train"]
    with pytest.raises(
        DataError, match=r"00000\.tar: 00000000. is not a readable|0000000010 is not"
    ):
        train.pixels(np.arange(len(train.labels)))
    data = read(tmp_path / "b", skip_damaged=True)
    assert sum(len(part.labels) for part in data.splits.values()) == 9
    assert data.damaged == 2
    (tmp_path / "b/classes.txt").write_text("only one\n")
    with pytest.raises(DataError, match="1 lines, and a class 1"):
        read(tmp_path / "b")


def test_recipe_trains_on_shards(tmp_path: Path) -> None:
    write_shards(tmp_path / "d", samples(24), size=20_000)
    flags = [f"--data={tmp_path / 'd'}", "--image-size=16", "--augment", "resized-crop", "flip"]
    extra = ["--device=cpu", "--checkpoint-every=never", "--steps=3", "--global-batch=8"]
    assert image.main([f"--run-dir={tmp_path / 'run'}", *flags, *extra]) == 0
    found = json.loads((tmp_path / "run/model/config.json").read_text())
    assert found["data"]["sizes"] == {"train": 20, "test": 4}
    gc.collect()  # closes the open file of the index


def test_texts_in_shards(tmp_path: Path) -> None:
    texts = ({"txt": f"text {number}", "cls": number % 3} for number in range(30))
    write_shards(tmp_path, texts, size=10_000)
    data = load_texts(TextOptions(data=str(tmp_path)))
    assert data.labels == ("0", "1", "2")
    assert sorted(sum((texts for texts, _ in data.splits.values()), [])) == sorted(  # noqa: RUF017
        f"text {number}" for number in range(30)
    )
    write_shards(tmp_path / "bad", [{"json": {}, "cls": 1}])
    with pytest.raises(DataError, match=r"bad/00000\.tar: 000000000 is not a text with a class"):
        load_texts(TextOptions(data=str(tmp_path / "bad")))


READ = """
import json, sys
import numpy
from paceline.recipes.data.images import load
from paceline.recipes.data.texts import load_texts
from paceline.recipes.options import ImageOptions, TextOptions
from paceline.spec.errors import PacelineError

photos, texts = sys.argv[1:]
def refusal(folder, **more):
    try:
        load(ImageOptions(data=folder, **more))
    except PacelineError as error:
        return error.render()
data = load(ImageOptions(data=photos, image_size=16, augment=("resized-crop",)))
train = data.splits["train"]
print(json.dumps({
    "classes": data.classes, "id": int(train._ids[3]), "label": int(train.labels[3]),
    "pixels": train.pixels(numpy.array([3])).tolist(),
    "labels": load_texts(TextOptions(data=texts)).labels,
    "skipped": refusal(photos, skip_damaged=True), "unfit": refusal(texts),
}))
"""


def test_parquet_with_tar_column_names(tmp_path: Path) -> None:
    """The recipes read such folders, like ``ShardedDataset``."""
    skip_reason = "not run: pyarrow is not installed"
    arrow = pytest.importorskip("pyarrow", reason=skip_reason)
    parquet = pytest.importorskip("pyarrow.parquet", reason=skip_reason)
    packed, folders = [*samples(20)], [tmp_path / "photos", tmp_path / "texts"]
    texts = {"txt": [f"text {number}" for number in range(9)], "cls": [0, 1, 2] * 3}
    photo = {name: [item[name] for item in packed] for name in ("png", "cls")}
    for target_folder, columns in zip(folders, (photo, texts), strict=True):
        target_folder.mkdir()
        parquet.write_table(arrow.table(columns), target_folder / "00000.parquet")
    # in another process, as the library leaves threads and variables behind
    argv = [sys.executable, "-c", READ, *map(str, folders)]
    env = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    completed = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert (result["classes"], result["labels"]) == (["0", "1"], ["0", "1", "2"])
    item = packed[result["id"]]
    (tmp_path / "one.png").write_bytes(item["png"])
    expected = decoding.decode_resized(tmp_path / "one.png", 3, (16, 16), crop=True)
    assert np.array_equal(np.array(result["pixels"])[0], expected)
    assert result["label"] == item["cls"]
    assert "--skip-damaged has no effect" in result["skipped"]
    assert "png (bytes) and cls (a number)" in result["unfit"]


def test_ignores_operating_system_files(tmp_path: Path) -> None:
    for name, red in (("cat", 200), ("dog", 20)):
        for number in range(6):
            path = tmp_path / name / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (20, 20), (red, number, 60)).save(path)
    clean = read(tmp_path)
    apple_double = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X"
    litter = ["cat/._0.png", "__MACOSX/cat/._0.png", "dog/.ipynb_checkpoints/1-checkpoint.png",
              ".DS_Store", "dog/Thumbs.db", "@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg"]  # fmt: skip
    for name in litter:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(apple_double)
    data = read(tmp_path)
    assert data.classes == ("cat", "dog")
    assert data.fingerprint == clean.fingerprint
    assert (clean.ignored, data.ignored) == (0, len(litter))
    assert decoding.image_files(tmp_path / "cat") == [tmp_path / f"cat/{n}.png" for n in range(6)]
