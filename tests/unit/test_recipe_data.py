"""Tests the readers of image data sets, on files created here in the original formats."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.cli.recipe_job import absolute_folder
from paceline.recipes.data import decoding, find_data
from paceline.recipes.data.images import ImageData, load
from paceline.recipes.options import ImageOptions
from paceline.recipes.preprocessing import normalisation
from paceline.spec.errors import DataError

RANDOM = np.random.default_rng(0)


def idx(array: np.ndarray[Any, Any]) -> bytes:
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, *, packed: bool = True, label: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 6), ("t10k", 4)):
        labels = np.arange(count) % 2 * label
        files = {
            f"{part}-images-idx3-ubyte": idx(RANDOM.integers(0, 256, (count, 9, 8))),
            f"{part}-labels-idx1-ubyte": idx(labels),
        }
        for name, content in files.items():
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


def write_cifar(folder: Path, *, binary: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        rows = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)
        labels = [3, 9]
        if binary:
            records = b"".join(
                bytes([k]) + row.tobytes() for k, row in zip(labels, rows, strict=True)
            )
            (folder / f"{name}.bin").write_bytes(records)
        else:
            content = {b"data": rows, b"labels": labels, b"batch_label": b"x"}
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def write_folder(folder: Path, classes: dict[str, int], size: int = 10) -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = RANDOM.integers(0, 256, (size, size + 2, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def read(source: Path | str, data_dir: Path | str = "", **overrides: Any) -> ImageData:
    return load(ImageOptions(data=str(source), data_dir=str(data_dir), **overrides))


def test_bundled_digits() -> None:
    data = read("digits")
    assert data.shape == (1, 8, 8)
    assert len(data.classes) == 10
    assert {name: len(split.labels) for name, split in data.splits.items()} == {
        "train": 1347,
        "test": 450,
    }
    assert data.fingerprint == "7ff010b5b8d7d00d"
    assert min(np.bincount(data.splits["test"].labels)) >= 40


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("subfolder", ["", "mnist", "MNIST/raw"])
def test_idx_files(tmp_path: Path, packed: bool, subfolder: str) -> None:
    write_idx(tmp_path / subfolder, packed=packed)
    data = read("mnist", tmp_path)
    assert data.shape == (1, 9, 8)
    assert data.splits["train"].pixels(np.array([5, 0])).shape == (2, 1, 9, 8)


def test_idx_files_by_path(tmp_path: Path) -> None:
    write_idx(tmp_path, label=4)
    assert read(tmp_path).classes == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize("binary", [True, False])
def test_cifar_files(tmp_path: Path, binary: bool) -> None:
    write_cifar(tmp_path / "cifar10", binary=binary)
    data = read("cifar10", tmp_path)
    assert data.shape == (3, 32, 32)
    assert data.splits["train"].labels.tolist() == [3, 9] * 5
    assert data.splits["test"].pixels(np.array([0]))[0, 0, 0].tolist() == list(range(32))
    assert data.classes[3] == "cat"


def test_cifar100_files(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    names = [f"class {number}".encode() for number in range(100)]
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}, protocol=2))
    for part in ("train", "test"):
        batch = {
            b"data": np.full((3, 3072), 7, np.uint8),
            b"fine_labels": [0, 42, 99],
            b"coarse_labels": [0, 1, 19],
        }
        (folder / part).write_bytes(pickle.dumps(batch, protocol=2))
    data = read("cifar100", tmp_path)
    assert data.splits["train"].labels.tolist() == [0, 42, 99]
    assert data.classes[42] == "class 42"
    (folder / "meta").write_bytes(b"no pickle")
    with pytest.raises(DataError, match="CIFAR-100's classes"):
        read(folder)


def test_cifar_versions_have_equal_fingerprint(tmp_path: Path) -> None:
    write_cifar(tmp_path / "a", binary=True)
    write_cifar(tmp_path / "b", binary=False)
    assert read(tmp_path / "a").fingerprint == read(tmp_path / "b").fingerprint


def test_hostile_pickle_runs_no_code(tmp_path: Path) -> None:
    write_cifar(tmp_path, binary=False)
    target = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (target,))

    (tmp_path / "data_batch_2").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DataError, match="no image batch needs"):
        read(tmp_path)
    assert not target.exists()


class CraftedArray:
    """An object that is pickled as an array whose state does not match its content."""

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        make = np.empty(0).__reduce__()[0]
        return make, (np.ndarray, (0,), b"b"), self.state


U1 = np.dtype("u1")


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (CraftedArray(1, (2, 3072), np.dtype("O"), False, b"\1" * 2 * 3072 * 8), [3, 9]),
        (CraftedArray(1, (2, 3072), U1, False, b"short"), [3, 9]),
        (CraftedArray(1, (2**62, 3072), U1, False, b""), [3, 9]),
        (CraftedArray(1, (2, 3072), U1, True, b"\1" * 6144), [3, 9]),
        (CraftedArray(1, (2, 3071), U1, False, b"\1" * 6142), [3, 9]),
        (np.zeros((2, 3072), np.float64), [3, 9]),
        ([[1]], [3, 9]),
        (np.zeros((2, 3072), np.uint8), [3, [9]]),
        (np.zeros((2, 3072), np.uint8), [3, 2**80]),
        (np.zeros((2, 3072), np.uint8), np.array([3, 9])),
    ],
)
def test_rejects_crafted_batch(tmp_path: Path, data: Any, labels: Any) -> None:
    """The description of arrays in a file is checked before numpy uses it."""
    write_cifar(tmp_path, binary=False)
    crafted = pickle.dumps({b"data": data, b"labels": labels}, protocol=2)
    (tmp_path / "data_batch_2").write_bytes(crafted)
    with pytest.raises(DataError, match=r"data_batch_2 is (truncated, damaged or )?no CIFAR-10|of"):
        read(tmp_path)


def test_pickle_cannot_call_numpy(tmp_path: Path) -> None:
    """``ndarray(shape, dtype("O"), bytes)`` would interpret the bytes as pointers."""
    write_cifar(tmp_path, binary=False)

    class Pointers:
        def __reduce__(self) -> Any:
            return np.ndarray, ((4,), np.dtype("O"), b"\1" * 32)

    content = {b"data": Pointers(), b"labels": [Pointers(), 1]}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(DataError, match="data_batch_1"):
        read(tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_reads_batches_of_all_pickle_protocols(tmp_path: Path, protocol: int) -> None:
    write_cifar(tmp_path, binary=False)
    expected = read(tmp_path).fingerprint
    for file in tmp_path.iterdir():
        file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), protocol=protocol))
    assert read(tmp_path).fingerprint == expected


def test_rejects_oversized_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, {"a": 5, "b": 5})
    Image.new("L", (8000, 5000)).save(tmp_path / "a/0.png")
    with pytest.raises(DataError, match="8000 × 5000 pixels, more than the 32 million") as caught:
        read(tmp_path)
    assert "0.png" in caught.value.render()
    remaining = read(tmp_path, skip_damaged=True).splits.values()
    assert sum(len(split.labels) for split in remaining) == 9
    (tmp_path / "a/0.png").unlink()
    Image.new("RGB", (800, 600)).save(tmp_path / "a/0.jpg")
    monkeypatch.setattr(decoding, "MAX_PIXELS", 200_000)
    read_all(read(tmp_path))  # a JPEG is decoded at reduced size


def test_rejects_oversized_image_in_hub_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a Hugging Face data set, whose rows Paceline decodes instead of the library."""
    import datasets

    for name in ("HF_HUB_DISABLE_TELEMETRY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # tqdm would start a thread

    def packed(side: int) -> dict[str, Any]:
        file = io.BytesIO()
        Image.new("L", (side, side)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    rows = {"image": [packed(4)] * 9 + [packed(6000)], "label": [0, 1] * 5}
    built = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    built.save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match="row 9") as caught:
        read_all(read(tmp_path / "d"))
    assert "6000 × 6000 pixels, more than the 32 million" in caught.value.render()


def test_postscript_image_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow would pass PostScript with another file name to Ghostscript."""
    write_folder(tmp_path, {"a": 5, "b": 5})
    (tmp_path / "a/0.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"
                                       b"%%EndComments\nshowpage\n")  # fmt: skip
    started: list[object] = []
    monkeypatch.setattr("subprocess.Popen", lambda *a, **_: started.append(a))
    with pytest.raises(DataError, match=r"0\.png is not a readable image"):
        read_all(read(tmp_path))
    assert started == []


@pytest.mark.parametrize(("depth", "reason"), [(2, "another shape"), (40, "share too many parts")])
def test_rejects_nested_shape_quickly(tmp_path: Path, depth: int, reason: str) -> None:
    """A list that contains itself twice, nested 30 times, is small, but its text is not."""
    write_cifar(tmp_path, binary=False)
    bomb: list[Any] = []
    for _ in range(depth):
        bomb = [bomb, bomb]
    path = tmp_path / "data_batch_1"
    raw = pickle.dumps(bomb, protocol=2)[2:-1]  # without header and end
    built = b"\x80\x02}(C\x04datac" + b"numpy\nndarray\n)R(K\x01(" + raw
    built += b"K\x01tcnumpy\ndtype\n(U\x02u1tR\x89C\x00tbC\x06labels](K\x01eu."
    path.write_bytes(built)
    start = time.process_time()
    with pytest.raises(DataError, match="truncated, damaged") as caught:
        read(tmp_path)
    assert reason in caught.value.render()
    assert time.process_time() - start < 5


def test_gzip_is_read_only_up_to_declared_size(tmp_path: Path) -> None:
    write_idx(tmp_path)
    labels = next(tmp_path.glob("train-labels*"))
    header = bytes((0, 0, 8, 1)) + (6).to_bytes(4, "big")
    packed = gzip.compress(header + bytes(1 << 26))
    labels.unlink()
    labels.with_name("train-labels-idx1-ubyte.gz").write_bytes(packed)
    with pytest.raises(DataError, match="expected 14 bytes of content, found 3"):
        read("mnist", tmp_path)


def test_folders_with_splits(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 3, "dog": 2})
    write_folder(tmp_path / "valid", {"cat": 1, "dog": 1})
    data = read(tmp_path, image_size=16)
    assert (data.classes, data.shape, data.held_out) == (("cat", "dog"), (3, 16, 16), "val")
    assert data.splits["train"].labels.tolist() == [0, 0, 0, 1, 1]
    assert data.splits["val"].pixels(np.array([1])).shape == (1, 3, 16, 16)


def test_folders_without_splits(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 10, "b": 5, "c": 1})
    first, repeated = read(tmp_path, seed=3), read(tmp_path, seed=3)
    assert first.fingerprint == repeated.fingerprint
    assert read(tmp_path, seed=4).fingerprint != first.fingerprint
    assert np.bincount(first.splits["train"].labels).tolist() == [8, 4, 1]
    assert np.bincount(first.splits["test"].labels).tolist() == [2, 1]


def test_val_fraction_splits_training_data() -> None:
    data = read("digits", val_fraction=0.1, seed=1)
    sizes = {name: len(split.labels) for name, split in data.splits.items()}
    assert sizes["train"] + sizes["val"] == 1347
    assert sizes["test"] == 450
    train, val = (data.splits[name].pixels(np.arange(sizes[name])) for name in ("train", "val"))
    assert not {image.tobytes() for image in val} & {image.tobytes() for image in train}
    assert (data.watched, data.held_out) == ("val", "test")
    assert data.fingerprint != read("digits", val_fraction=0.1, seed=2).fingerprint


def test_held_out_folder_may_have_one_class(tmp_path: Path) -> None:
    for name in ("train/cat", "train/dog", "val/dog"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / name / "0.png")
    splits = load(ImageOptions(data=str(tmp_path))).splits
    assert (splits["train"].labels.tolist(), splits["val"].labels.tolist()) == ([0, 1], [1])


def test_val_fraction_splits_folders(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 20, "b": 10})
    data = read(tmp_path, val_fraction=0.25)
    counts = {name: np.bincount(split.labels).tolist() for name, split in data.splits.items()}
    assert counts == {"train": [12, 6], "val": [4, 2], "test": [4, 2]}
    assert len(data.splits["val"].pixels(np.arange(6))) == 6


def test_normalisation_is_measured() -> None:
    data = read("digits")
    images = data.splits["train"].pixels(np.arange(1347)) / 255
    measured = normalisation(data.splits["train"], 1)
    assert measured.mean[0] == pytest.approx(images.mean(), abs=1e-12)
    assert measured.deviation[0] == pytest.approx(images.std(), abs=1e-9)


def truncate(path: Path, by: int) -> None:
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content[:-by]))


def test_truncated_idx_names_bytes(tmp_path: Path) -> None:
    write_idx(tmp_path)
    truncate(tmp_path / "train-images-idx3-ubyte.gz", 10)
    with pytest.raises(DataError, match="expected 448 bytes of content, found 438"):
        read(tmp_path)


def test_truncated_gzip_names_bytes(tmp_path: Path) -> None:
    write_idx(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DataError, match="expected 304 bytes of content, found 2"):
        read(tmp_path)


def bad_label(folder: Path) -> None:
    write_idx(folder, label=40)


def no_labels(folder: Path) -> None:
    write_idx(folder)
    (folder / "train-labels-idx1-ubyte.gz").unlink()


def not_gzip(folder: Path) -> None:
    write_idx(folder)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"<html>not found</html>")


def not_idx(folder: Path) -> None:
    write_idx(folder)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"hello"))


def labels_too_short(folder: Path) -> None:
    write_idx(folder)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(5))))


def cifar_cut(folder: Path) -> None:
    write_cifar(folder, binary=True)
    (folder / "data_batch_3.bin").write_bytes(b"\0" * 3072)


def cifar_pickle_cut(folder: Path) -> None:
    write_cifar(folder, binary=False)
    path = folder / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-100])


def empty_class(folder: Path) -> None:
    write_folder(folder, {"a": 2, "b": 2, "c": 0})


def no_classes(folder: Path) -> None:
    folder.mkdir(exist_ok=True)


def torn_image(folder: Path) -> None:
    write_folder(folder, {"a": 5, "b": 5})
    (folder / "b" / "1.png").write_bytes(b"\x89PNG nonsense")


def named_pipe(folder: Path) -> None:
    write_folder(folder, {"a": 2, "b": 2})
    os.mkfifo(folder / "a" / "x.png")


def foreign_class(folder: Path) -> None:
    write_folder(folder / "train", {"a": 2, "b": 2})
    write_folder(folder / "test", {"a": 2, "z": 2})


def no_held_out(folder: Path) -> None:
    write_folder(folder / "train", {"a": 2, "b": 2})


def test_runs_folder_is_no_class(tmp_path: Path) -> None:
    """A training that was started in the data folder has created it there."""
    write_folder(tmp_path, {"cat": 10, "dog": 10})
    (tmp_path / "runs/image-1").mkdir(parents=True)
    (tmp_path / "runs/image-1/plan.json").write_text("{}")
    assert read(tmp_path).classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (bad_label, "mnist", "label 40 of image 1; there are 10 classes"),
        (no_labels, "mnist", "no train-labels-idx1-ubyte"),
        (not_gzip, "mnist", "22 bytes that are not valid gzip data"),
        (not_idx, "mnist", "5 bytes that begin with 68 65 6c 6c"),
        (labels_too_short, "mnist", "5 labels, 6 images"),
        (cifar_cut, "cifar10", "data_batch_3.bin is truncated or damaged"),
        (cifar_cut, "cifar10", "expected 3073 bytes (a multiple of 3073), found 3072"),
        (cifar_pickle_cut, "cifar10", "bytes: it ends too early"),
        (empty_class, "", "holds no images"),
        (no_classes, "", "holds no folders for at least two classes"),
        (torn_image, "", "1.png is not a readable image"),
        (named_pipe, "", "it is not a regular file"),
        (foreign_class, "", "test/z is not a class of the training folder"),
        (no_held_out, "", "nothing held out"),
    ],
)
def test_rejects_invalid_data(tmp_path: Path, make: Any, name: str, message: str) -> None:
    make(tmp_path)
    with pytest.raises(DataError) as caught:
        read(name or tmp_path, tmp_path if name else "")
    assert message in caught.value.render()
    assert str(tmp_path) in caught.value.render()


def test_truncated_image_error_names_file(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 5, "b": 5})
    path = tmp_path / "a" / "0.png"
    path.write_bytes(path.read_bytes()[:200])
    data = read(tmp_path)
    with pytest.raises(DataError, match=r"0.png is not a readable image"):
        read_all(data)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="files of mnist were not found"):
        read("mnist", tmp_path, offline=True)
    with pytest.raises(DataError, match="no such folder"):
        read(tmp_path / "nope")


def test_file_as_image_data_suggests_text_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOST", "n1")  # as a rank
    (tmp_path / "reviews.csv").write_text("good,text")
    with pytest.raises(DataError, match=r"reviews\.csv is a file") as caught:
        read(tmp_path / "reviews.csv")
    assert "paceline train text" in caught.value.remedy


def read_all(data: ImageData) -> None:
    for split in data.splits.values():
        split.pixels(np.arange(len(split.labels)))


def test_find_data_prefers_original_path_of_same_file(tmp_path: Path) -> None:
    (tmp_path / "sent").mkdir()
    original, sent = tmp_path / "a.csv", tmp_path / "sent/a.csv"
    original.write_text("x")
    sent.symlink_to(original)
    assert find_data(str(original), str(sent.parent)) == original
    sent.unlink()
    sent.write_text("y")  # as on a host with another file at that path
    assert find_data(str(original), str(sent.parent)) == sent
    assert find_data(str(tmp_path / "b.csv"), str(sent.parent)) == tmp_path / "b.csv"


def test_missing_folder_error_names_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the whole path on the launching machine and the host that lacks the folder."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "imgs", {"a": 2, "b": 2})
    (tmp_path / "digits").mkdir()
    assert absolute_folder("imgs") == str(tmp_path / "imgs")
    assert absolute_folder("digits") == "digits"
    assert absolute_folder("user/name") == "user/name"
    monkeypatch.setenv("PACELINE_HOST", "n2")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "gone")
    assert f"no {tmp_path}/gone on n2" in caught.value.render()
    assert "on every host at the same path: copy it there (rsync -a" in caught.value.render()


@pytest.mark.parametrize(
    ("images", "remedy"), [(1, "a class needs one to train on"), (2, "raise --test-fraction")]
)
def test_too_few_images_error_says_what_helps(tmp_path: Path, images: int, remedy: str) -> None:
    write_folder(tmp_path, {"a": images, "b": images})
    with pytest.raises(DataError, match=f"{2 * images} images in 2 classes") as caught:
        read(tmp_path)
    assert remedy in caught.value.remedy
