"""Tests that objects stored in files are read back equal, and that errors name the damaged part."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest
import torch

from paceline.agent.ranks import pickles


def reload(value: Any, folder: Path) -> Any:
    written = pickles.write(str(folder / "file"), [("it", value)], cloudpickle)
    assert (folder / "file").stat().st_size == written.size
    return pickles.open_objects(str(folder / "file"), written.sha256).load()


def pickling_error(value: Any, folder: Path) -> str:
    with pytest.raises(pickles.NotPicklableError) as excinfo:
        pickles.write(str(folder / "file"), [("it", value)], cloudpickle)
    return str(excinfo.value)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool,
                                  torch.complex64, torch.float8_e4m3fn])  # fmt: skip
def test_round_trips_tensors_of_all_dtypes(tmp_path: Path, kind: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(kind)
    loaded = reload({"whole": tensor, "turned": tensor.T, "none": tensor[:0], "one": tensor[1, 1]},
                    tmp_path)  # fmt: skip
    for name, expected in (("whole", tensor), ("turned", tensor.T), ("none", tensor[:0]),
                           ("one", tensor[1, 1])):  # fmt: skip
        assert loaded[name].dtype == kind
        assert loaded[name].shape == expected.shape
        assert loaded[name].tolist() == expected.tolist()


def test_round_trips_conjugate_views(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    assert reload(tensor, tmp_path).tolist() == [1 - 2j]
    assert reload(tensor.imag, tmp_path).tolist() == [-2.0]


def test_restored_arrays_are_writable(tmp_path: Path) -> None:
    loaded = reload({"a": torch.ones(2, requires_grad=True), "b": numpy.ones(3)}, tmp_path)
    assert loaded["a"].requires_grad
    loaded["b"] += 1
    with torch.no_grad():
        loaded["a"] += 1
    assert loaded["a"].tolist() == [2, 2]


def test_preserves_shared_references(tmp_path: Path) -> None:
    tensor, array = torch.ones(1000), numpy.ones(1000)
    loaded = reload([tensor, tensor, array, array], tmp_path)
    assert loaded[0] is loaded[1]
    assert loaded[2] is loaded[3]
    assert (tmp_path / "file").stat().st_size < 14_000


def test_round_trips_model_with_shared_weights(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    loaded = reload(model, tmp_path)
    assert loaded[1].weight is loaded[0].weight
    assert isinstance(loaded[0].weight, torch.nn.Parameter)
    assert torch.equal(loaded(torch.ones(3)), model(torch.ones(3)))


def test_round_trips_sparse_and_meta_tensors(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(reload(sparse, tmp_path).to_dense(), torch.eye(3))
    assert reload(torch.empty(2, device="meta"), tmp_path).is_meta


def test_loads_objects_in_order(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    written = pickles.write(path, [("a", {"x": 1}), ("b", numpy.arange(3))], cloudpickle)
    objects = pickles.open_objects(path, written.sha256)
    assert objects.load() == {"x": 1}
    assert objects.load().tolist() == [0, 1, 2]
    assert written.starts[0] == 0 < written.starts[1] < written.size


def test_rejects_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = pickles.write(str(path), [("it", numpy.arange(1000))], cloudpickle)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[written.size // 2] ^= 1
    for damaged in (b"", content[:-1], content[:-500], content + b"x", bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(pickles.DamagedError):
            pickles.open_objects(str(path), written.sha256)


def test_does_not_follow_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / "file").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        pickles.write(str(tmp_path / "file"), [("it", 1)], cloudpickle)
    with pytest.raises(OSError, match="symbolic"):
        pickles.open_objects(str(tmp_path / "file"), "")
    assert (tmp_path / "other").read_text() == "mine"


class Holder:
    def __init__(self) -> None:
        self.inner = {"deep": [1, threading.Lock()]}


def test_error_names_unpicklable_part(tmp_path: Path) -> None:
    assert "it is a generator, which" in pickling_error((x for x in ()), tmp_path)
    assert "it['lock'] is a _thread.lock" in pickling_error(
        {"ok": 1, "lock": threading.Lock()}, tmp_path
    )
    assert "it.inner['deep'][1] is a _thread.lock" in pickling_error(Holder(), tmp_path)
    assert "it.keywords['x'] is" in pickling_error(
        functools.partial(print, x=threading.Lock()), tmp_path
    )


def test_error_names_captured_variable(tmp_path: Path) -> None:
    lock = threading.Lock()

    def inner() -> object:
        return lock

    def outer() -> object:
        return inner()

    assert "the variable lock of " in pickling_error(outer, tmp_path)
