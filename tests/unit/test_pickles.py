"""Objects as files: what comes back is what was written, or an error that names the part."""

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


def through(value: Any, folder: Path) -> Any:
    written = pickles.write(str(folder / "file"), [("it", value)], cloudpickle)
    assert (folder / "file").stat().st_size == written.size
    return pickles.open_objects(str(folder / "file"), written.sha256).load()


def refusal(value: Any, folder: Path) -> str:
    with pytest.raises(pickles.NotPicklableError) as refused:
        pickles.write(str(folder / "file"), [("it", value)], cloudpickle)
    return str(refused.value)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.bool,
                                  torch.complex64, torch.float8_e4m3fn])  # fmt: skip
def test_tensors_of_every_kind_come_back(tmp_path: Path, kind: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(kind)
    found = through({"whole": tensor, "turned": tensor.T, "none": tensor[:0], "one": tensor[1, 1]},
                    tmp_path)  # fmt: skip
    for name, expected in (("whole", tensor), ("turned", tensor.T), ("none", tensor[:0]),
                           ("one", tensor[1, 1])):  # fmt: skip
        assert found[name].dtype == kind
        assert found[name].shape == expected.shape
        assert found[name].tolist() == expected.tolist()


def test_conjugates_come_as_they_are_seen(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    assert through(tensor, tmp_path).tolist() == [1 - 2j]
    assert through(tensor.imag, tmp_path).tolist() == [-2.0]


def test_what_came_back_can_be_written_to_and_trained(tmp_path: Path) -> None:
    found = through({"a": torch.ones(2, requires_grad=True), "b": numpy.ones(3)}, tmp_path)
    assert found["a"].requires_grad
    found["b"] += 1
    with torch.no_grad():
        found["a"] += 1
    assert found["a"].tolist() == [2, 2]


def test_one_object_in_two_places_stays_one(tmp_path: Path) -> None:
    tensor, array = torch.ones(1000), numpy.ones(1000)
    found = through([tensor, tensor, array, array], tmp_path)
    assert found[0] is found[1]
    assert found[2] is found[3]
    assert (tmp_path / "file").stat().st_size < 14_000


def test_a_model_and_its_shared_weights_come_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    found = through(model, tmp_path)
    assert found[1].weight is found[0].weight
    assert isinstance(found[0].weight, torch.nn.Parameter)
    assert torch.equal(found(torch.ones(3)), model(torch.ones(3)))


def test_tensors_that_are_more_than_numbers_are_left_to_torch(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(through(sparse, tmp_path).to_dense(), torch.eye(3))
    assert through(torch.empty(2, device="meta"), tmp_path).is_meta


def test_several_objects_come_in_their_order(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    written = pickles.write(path, [("a", {"x": 1}), ("b", numpy.arange(3))], cloudpickle)
    objects = pickles.open_objects(path, written.sha256)
    assert objects.load() == {"x": 1}
    assert objects.load().tolist() == [0, 1, 2]
    assert written.starts[0] == 0 < written.starts[1] < written.size


def test_a_file_that_is_not_as_told_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = pickles.write(str(path), [("it", numpy.arange(1000))], cloudpickle)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[written.size // 2] ^= 1
    for damaged in (b"", whole[:-1], whole[:-500], whole + b"x", bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(pickles.DamagedError):
            pickles.open_objects(str(path), written.sha256)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
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


def test_the_part_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    assert "it is a generator, which" in refusal((x for x in ()), tmp_path)
    assert "it['lock'] is a _thread.lock" in refusal({"ok": 1, "lock": threading.Lock()}, tmp_path)
    assert "it.inner['deep'][1] is a _thread.lock" in refusal(Holder(), tmp_path)
    assert "it.keywords['x'] is" in refusal(functools.partial(print, x=threading.Lock()), tmp_path)


def test_variables_of_a_function_are_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def inner() -> object:
        return lock

    def outer() -> object:
        return inner()

    assert "the variable lock of " in refusal(outer, tmp_path)
